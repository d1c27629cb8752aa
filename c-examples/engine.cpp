/*
 * engine: the experts of a whole model in an engine of its own, as hybrid CPU and GPU engines have them.
 *
 * Each layer is split into parts, one for each NUMA node: every part has its rows of gate and up and its columns of down, of all experts, in an
 * arena of its own, where the engine would have called aligned_alloc; threads that belong to the node fill it and compute with it, by the
 * engine's own pool. What the parts give is added up. No thread and no allocation of Berth's, and all that it holds lies in files.
 *
 *     make engine && ./engine /var/tmp      # no argument: ordinary memory
 */
#include <berth.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr size_t LAYERS = 2, PARTS = 2, THREADS = 2;              // threads of each part
constexpr size_t D = 128, F = 256, EXPERTS = 6, USED = 2, TOKENS = 5; // sizes of a layer
constexpr size_t F_PART = F / PARTS;
constexpr uint32_t Q8_0 = 8;                                      // GGML_TYPE_Q8_0: a half-precision scale, 32 signed bytes
constexpr size_t BLOCK = 32, BLOCK_BYTES = 34;

void check(enum berth_status status, const char *what) {
    if (status != BERTH_STATUS_OK) {
        throw std::runtime_error(std::string(what) + ": " + berth_last_error());
    }
}

// The engine's own threads. Each call of `run` is one loop, shared out over them and the caller.
class Pool {
public:
    explicit Pool(size_t threads) {
        for (size_t i = 1; i < threads; i++) {
            threads_.emplace_back([this] { work(); });
        }
    }
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;
    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            end_ = true;
        }
        wake_.notify_all();
        for (auto &thread : threads_) {
            thread.join();
        }
    }

    size_t size() const { return threads_.size() + 1; }

    void run(size_t count, const std::function<void(size_t)> &body) {
        std::unique_lock<std::mutex> lock(mutex_);
        body_ = &body;
        next_ = 0;
        count_ = left_ = count;
        wake_.notify_all();
        while (left_ > 0) {
            if (!one(lock)) {
                done_.wait(lock);
            }
        }
        body_ = nullptr;
    }

    // What Berth calls: berth_run_fn.
    static void hook(void *pool, size_t count, berth_task_fn call, void *task) {
        static_cast<Pool *>(pool)->run(count, [&](size_t index) { call(task, index); });
    }

private:
    bool one(std::unique_lock<std::mutex> &lock) {
        if (body_ == nullptr || next_ == count_) {
            return false;
        }
        const size_t index = next_++;
        const auto &body = *body_;
        lock.unlock();
        body(index);
        lock.lock();
        if (--left_ == 0) {
            done_.notify_all();
        }
        return true;
    }
    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (!end_) {
            if (!one(lock)) {
                wake_.wait(lock);
            }
        }
    }

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    const std::function<void(size_t)> *body_ = nullptr;
    size_t next_ = 0, count_ = 0, left_ = 0;
    bool end_ = false;
};

struct CloseArena {
    void operator()(berth_arena *arena) const { berth_arena_close(arena); }
};
struct Free {
    void operator()(void *memory) const { std::free(memory); }
};

// Weights as the model's file has them: blocks of random bytes with the scale 2^-10, and what they mean.
class Matrix {
public:
    Matrix(size_t rows, size_t columns, std::mt19937 &random) : columns_(columns), blocks_(rows * columns / BLOCK * BLOCK_BYTES) {
        for (size_t at = 0; at < blocks_.size(); at += BLOCK_BYTES) {
            blocks_[at] = 0x00, blocks_[at + 1] = 0x14;
            std::generate_n(&blocks_[at + 2], BLOCK, [&] { return static_cast<unsigned char>(random()); });
        }
    }
    double at(size_t row, size_t column) const {
        const size_t index = row * columns_ + column;
        return static_cast<int8_t>(blocks_[index / BLOCK * BLOCK_BYTES + 2 + index % BLOCK]) / 1024.0;
    }
    // The bytes of some columns of a row.
    const unsigned char *row(size_t row, size_t column) const { return &blocks_[(row * columns_ + column) / BLOCK * BLOCK_BYTES]; }

private:
    size_t columns_;
    std::vector<unsigned char> blocks_;
};

constexpr size_t bytes_of(size_t values) { return values / BLOCK * BLOCK_BYTES; }

// A part of a layer, on one NUMA node.
class Part {
public:
    Part(const char *directory, size_t layer, size_t part, Pool &pool) : pool_(pool), first_(part * F_PART) {
        const std::string name = "blk." + std::to_string(layer) + " part " + std::to_string(part);
        constexpr size_t piece = size_t{2} << 20; // pieces take up whole ones
        berth_arena *arena = nullptr;
        const size_t bytes = (bytes_of(D * F_PART * EXPERTS) + piece - 1) / piece * piece;
        check(berth_arena_open(directory, name.c_str(), 3 * bytes, -1, &arena), "arena"); // on a real machine: the number of its node
        arena_.reset(arena);
        desc_.struct_size = sizeof desc_;
        desc_.d = D, desc_.f = F_PART, desc_.n_expert = EXPERTS, desc_.activation = BERTH_ACTIVATION_SWIGLU;
        for (berth_moe_weights *weights : {&desc_.gate, &desc_.up, &desc_.down}) {
            bool in_file = false;
            weights->size = bytes_of(D * F_PART * EXPERTS);
            weights->ggml_type = Q8_0;
            weights->data = berth_arena_alloc(arena, weights->size, &in_file); // here was aligned_alloc
            if (weights->data == nullptr) {
                throw std::runtime_error(berth_last_error());
            }
            in_files += in_file;
        }
        check(berth_moe_workspace_size(&desc_, TOKENS, USED, pool.size(), &workspace_size_), "workspace");
        workspace_size_ = (workspace_size_ + BERTH_WORKSPACE_ALIGNMENT - 1) / BERTH_WORKSPACE_ALIGNMENT * BERTH_WORKSPACE_ALIGNMENT;
        workspace_.reset(std::aligned_alloc(BERTH_WORKSPACE_ALIGNMENT, workspace_size_));
        if (!workspace_) {
            throw std::bad_alloc();
        }
    }

    // By the threads of the node, so that the pages lie there.
    void fill(const Matrix &gate, const Matrix &up, const Matrix &down) {
        auto copy = [](const berth_moe_weights &to, size_t offset, const unsigned char *from, size_t bytes) {
            std::copy_n(from, bytes, static_cast<unsigned char *>(const_cast<void *>(to.data)) + offset);
        };
        pool_.run(EXPERTS, [&](size_t expert) {
            const size_t slice = bytes_of(D * F_PART);
            copy(desc_.gate, expert * slice, gate.row(expert * F + first_, 0), slice);
            copy(desc_.up, expert * slice, up.row(expert * F + first_, 0), slice);
            for (size_t row = 0; row < D; row++) {
                copy(desc_.down, expert * slice + row * bytes_of(F_PART), down.row(expert * D + row, first_), bytes_of(F_PART));
            }
        });
    }

    void forward(const float *x, const int32_t *ids, const float *weights) {
        berth_moe_io io{};
        io.struct_size = sizeof io;
        io.n_tokens = TOKENS, io.n_used = USED;
        io.x = x, io.ids = ids, io.weights = weights, io.y = y.data();
        io.workspace = workspace_.get(), io.workspace_size = workspace_size_;
        berth_threads threads{};
        threads.struct_size = sizeof threads;
        threads.run = Pool::hook, threads.context = &pool_, threads.count = pool_.size();
        check(berth_moe_forward(&desc_, &io, &threads), "forward");
    }

    std::vector<float> y = std::vector<float>(TOKENS * D);
    size_t in_files = 0;

private:
    Pool &pool_;
    size_t first_;
    std::unique_ptr<berth_arena, CloseArena> arena_;
    std::unique_ptr<void, Free> workspace_;
    size_t workspace_size_ = 0;
    berth_moe_desc desc_{};
};

// How far the answer is from plain arithmetic, as a share of its size.
double error(const std::vector<float> &y, const Matrix &gate, const Matrix &up, const Matrix &down, const std::vector<float> &x,
             const std::vector<int32_t> &ids, const std::vector<float> &weights) {
    double difference = 0, size = 0;
    for (size_t token = 0; token < TOKENS; token++) {
        std::vector<double> expected(D);
        for (size_t j = 0; j < USED; j++) {
            const size_t expert = static_cast<size_t>(ids[token * USED + j]);
            for (size_t f = 0; f < F; f++) {
                double g = 0, u = 0;
                for (size_t d = 0; d < D; d++) {
                    g += gate.at(expert * F + f, d) * static_cast<double>(x[token * D + d]);
                    u += up.at(expert * F + f, d) * static_cast<double>(x[token * D + d]);
                }
                const double inner = static_cast<double>(weights[token * USED + j]) * g / (1 + std::exp(-g)) * u;
                for (size_t d = 0; d < D; d++) {
                    expected[d] += inner * down.at(expert * D + d, f);
                }
            }
        }
        for (size_t d = 0; d < D; d++) {
            difference += std::pow(static_cast<double>(y[token * D + d]) - expected[d], 2);
            size += std::pow(expected[d], 2);
        }
    }
    return std::sqrt(difference / size);
}

int engine(const char *directory) {
    std::mt19937 random(1);
    std::uniform_real_distribution<float> uniform(-1, 1);
    std::vector<std::unique_ptr<Pool>> pools; // on a real machine: bound to their nodes
    for (size_t part = 0; part < PARTS; part++) {
        pools.push_back(std::make_unique<Pool>(THREADS));
    }
    Pool parts(PARTS); // one thread that leads each node
    size_t in_files = 0;
    double worst = 0;
    std::vector<std::vector<std::unique_ptr<Part>>> model(LAYERS);
    for (size_t layer = 0; layer < LAYERS; layer++) {
        const Matrix gate(EXPERTS * F, D, random), up(EXPERTS * F, D, random), down(EXPERTS * D, F, random);
        for (size_t part = 0; part < PARTS; part++) {
            model[layer].push_back(std::make_unique<Part>(directory, layer, part, *pools[part]));
            model[layer][part]->fill(gate, up, down);
            in_files += model[layer][part]->in_files;
        }

        std::vector<float> x(TOKENS * D), weights(TOKENS * USED), y(TOKENS * D);
        std::vector<int32_t> ids(TOKENS * USED);
        std::generate(x.begin(), x.end(), [&] { return uniform(random); });
        std::generate(weights.begin(), weights.end(), [&] { return std::abs(uniform(random)); });
        std::generate(ids.begin(), ids.end(), [&] { return static_cast<int32_t>(random() % EXPERTS); });
        std::vector<std::string> failed(PARTS);
        parts.run(PARTS, [&](size_t part) {
            try { // an exception must not leave a thread
                model[layer][part]->forward(x.data(), ids.data(), weights.data());
            } catch (const std::exception &e) {
                failed[part] = e.what();
            }
        });
        for (size_t part = 0; part < PARTS; part++) {
            if (!failed[part].empty()) {
                throw std::runtime_error(failed[part]);
            }
            std::transform(y.begin(), y.end(), model[layer][part]->y.begin(), y.begin(), std::plus<float>());
        }
        const double off = error(y, gate, up, down, x, ids, weights);
        worst = off > worst || std::isnan(off) ? off : worst;
    }
    // Q8_0 activations: 8 bits in each of three factors.
    const bool right = worst < 0.02;
    std::printf("%zu layers in %zu parts: %zu of %zu matrices lie in files, %s\n", LAYERS, PARTS, in_files, LAYERS * PARTS * 3,
                right ? "the answers are right" : "WRONG");
    return right ? 0 : 1;
}

} // namespace

int main(int argc, char **argv) {
    try {
        return engine(argc > 1 ? argv[1] : nullptr);
    } catch (const std::exception &e) {
        std::fprintf(stderr, "engine: %s\n", e.what());
        return 1;
    }
}
