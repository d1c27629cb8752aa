// Answers, with the std::regex that stock llama.cpp uses, which of the given names each of the given patterns matches.
//
// Input, repeated until end of file: a 32-bit length and a pattern; a 32-bit count; as many times a 32-bit length and a name.
// Output: a line per pattern: "E" if std::regex refuses it, else per name "1" or "0", or "T" from the first name on that took longer than the
// limit or overflowed the stack.
//
// The same two calls as in llama-model-loader.cpp: std::regex with its default grammar, std::regex_search without flags. std::regex_search
// cannot be interrupted and may recurse without bound, so a process of its own works through the patterns, and another one goes on behind
// the pattern on which it died.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <regex>
#include <string>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace {

constexpr long LIMIT_MICROSECONDS = 100 * 1000;

struct question {
    std::string pattern;
    std::vector<std::string> names;
    size_t at; // where its answer starts
};

bool read_u32(uint32_t & value) { return std::fread(&value, sizeof value, 1, stdin) == 1; }

bool read_text(std::string & text) {
    uint32_t length = 0;
    if (!read_u32(length)) {
        return false;
    }
    text.resize(length);
    return length == 0 || std::fread(text.data(), 1, length, stdin) == length;
}

void answer(const question & q, char * out) {
    itimerval timer{};
    timer.it_value.tv_usec = LIMIT_MICROSECONDS;
    setitimer(ITIMER_REAL, &timer, nullptr);
    try {
        const std::regex compiled(q.pattern);
        for (size_t i = 0; i < q.names.size(); ++i) {
            out[i] = std::regex_search(q.names[i], compiled) ? '1' : '0';
        }
    } catch (const std::regex_error &) {
        std::strcpy(out, "E");
    }
}

void * shared(size_t bytes) {
    return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

} // namespace

int main() {
    std::vector<question> questions;
    size_t total = 0;
    question q;
    while (read_text(q.pattern)) {
        uint32_t count = 0;
        if (!read_u32(count)) {
            return 1;
        }
        q.names.assign(count, std::string());
        for (std::string & name : q.names) {
            if (!read_text(name)) {
                return 1;
            }
        }
        q.at = total;
        total += count + 2;
        questions.push_back(q);
    }

    void * answers = shared(total + 1);
    void * progress = shared(sizeof(size_t));
    if (answers == MAP_FAILED || progress == MAP_FAILED) {
        return 1;
    }
    char * out = static_cast<char *>(answers);
    volatile size_t * next = static_cast<size_t *>(progress);
    for (const question & each : questions) {
        std::memset(out + each.at, 'T', each.names.size());
    }
    while (*next < questions.size()) {
        const pid_t child = fork();
        if (child == 0) {
            for (; *next < questions.size(); *next = *next + 1) {
                answer(questions[*next], out + questions[*next].at);
            }
            _exit(0);
        }
        if (child < 0 || waitpid(child, nullptr, 0) != child) {
            return 1;
        }
        if (*next < questions.size()) {
            *next = *next + 1;
        }
    }
    for (const question & each : questions) {
        std::puts(out + each.at);
    }
    return 0;
}
