/*
 * create_tensor: a loader with llama.cpp's own types that asks Berth where each tensor goes, instead of being a host into which Berth is loaded.
 *
 * docs/embedding.md shows the two functions below, parse_overrides and select_buft. Here they are compiled against a real libllama; its own loader
 * is then given the same rules, and must put every tensor where they said.
 *
 *     create_tensor BACKENDS_DIR MODEL.gguf RULES
 */
#include <berth.h>
#include <ggml-backend.h>
#include <ggml.h>
#include <gguf.h>
#include <llama.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

// [parse_overrides]
// -ot: Berth checks the text and splits it; what each target means is this program's to know.
struct overrides {
    berth_rules * rules = nullptr;
    std::vector<llama_model_tensor_buft_override> list; // ended by an entry of NULLs, as llama_model_params wants it

    overrides() = default;
    overrides(const overrides &) = delete;
    overrides & operator=(const overrides &) = delete;
    ~overrides() { berth_rules_free(rules); }
};

static std::map<std::string, ggml_backend_buffer_type_t> known_bufts() {
    std::map<std::string, ggml_backend_buffer_type_t> known = {
        { "CPU_MMAP",  berth_buft_cpu_mmap()  },
        { "CUDA_Host", berth_buft_cuda_host() },
        { "ARENA",     berth_buft_arena()     },
    };
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(ggml_backend_dev_get(i));
        known.emplace(ggml_backend_buft_name(buft), buft); // CPU and the devices; Berth's own are there already
    }
    return known;
}

static void parse_overrides(const char * text, overrides & out) {
    const auto known = known_bufts();
    std::vector<const char *> devices;
    for (const auto & [name, buft] : known) {
        if (buft == nullptr) {
            throw std::runtime_error(berth_last_error());
        }
        if (!ggml_backend_buft_is_host(buft)) {
            devices.push_back(name.c_str());
        }
    }
    if (berth_rules_new(devices.data(), devices.size(), &out.rules) != BERTH_STATUS_OK ||
        berth_rules_parse(out.rules, text) != BERTH_STATUS_OK) {
        throw std::runtime_error(berth_last_error()); // names rule and column
    }
    for (size_t i = 0; i < berth_rules_count(out.rules); i++) {
        berth_rule rule = {};
        rule.struct_size = sizeof(rule);
        if (berth_rules_get(out.rules, i, &rule) != BERTH_STATUS_OK) {
            throw std::runtime_error(berth_last_error());
        }
        out.list.push_back({ rule.pattern, known.at(rule.target) }); // valid as long as the rules
    }
    out.list.push_back({ nullptr, nullptr });
}
// [parse_overrides]

// [select_buft]
// create_tensor: where this one goes. The choice is kept when the model is mapped, unless `decision.downgraded` says that it was not.
static ggml_backend_buffer_type_t select_buft(const ggml_tensor * meta, uint32_t flags, const overrides & from, const berth_load & load,
                                              berth_decision & decision) {
    berth_tensor_desc desc = {};
    desc.struct_size = sizeof(desc);
    desc.name        = meta->name;
    desc.ggml_type   = meta->type;
    desc.flags       = flags;
    std::memcpy(desc.ne, meta->ne, sizeof(desc.ne));

    decision             = {};
    decision.struct_size = sizeof(decision);
    if (berth_decide(&desc, from.rules, &load, &decision) != BERTH_STATUS_OK) {
        throw std::runtime_error(berth_last_error());
    }
    if (decision.rule >= 0) {
        return from.list[static_cast<size_t>(decision.rule)].buft;
    }
    return known_bufts().at(decision.target); // what llama.cpp would have chosen without a rule: "CPU", or a device
}
// [select_buft]

static int run(const char * backends, const char * path, const char * text) {
    ggml_backend_load_all_from_path(backends);
    ggml_backend_reg_t berth = berth_reg();
    if (berth == nullptr) {
        throw std::runtime_error(berth_last_error());
    }
    ggml_backend_register(berth);

    overrides from;
    parse_overrides(text, from);
    llama_model_params params = llama_model_default_params();
    params.tensor_buft_overrides = from.list.data();

    berth_load load = {};
    load.struct_size = sizeof(load);
    if (berth_load_init(&load) != BERTH_STATUS_OK) {
        throw std::runtime_error(berth_last_error());
    }
    load.mmap = true;

    ggml_context * context = nullptr;
    gguf_init_params init = { true, &context };
    gguf_context * gguf = gguf_init_from_file(path, init);
    if (gguf == nullptr) {
        throw std::runtime_error("no model");
    }
    for (ggml_tensor * meta = ggml_get_first_tensor(context); meta != nullptr; meta = ggml_get_next_tensor(context, meta)) {
        berth_decision decision;
        ggml_backend_buffer_type_t buft = select_buft(meta, 0, from, load, decision);
        std::printf("%s %s %s %d\n", meta->name, ggml_backend_buft_name(buft), berth_memory_text(decision.memory), decision.rule);
    }
    gguf_free(gguf);
    ggml_free(context);

    // llama.cpp's own loader with the same list.
    llama_model * model = llama_model_load_from_file(path, params);
    if (model == nullptr) {
        throw std::runtime_error("llama.cpp does not load it");
    }
    llama_model_free(model);
    llama_backend_free();
    return 0;
}

int main(int argc, char ** argv) {
    if (argc != 4) {
        return 2;
    }
    try {
        return run(argv[1], argv[2], argv[3]);
    } catch (const std::exception & e) {
        std::fprintf(stderr, "create_tensor: %s\n", e.what());
        return 1;
    }
}
