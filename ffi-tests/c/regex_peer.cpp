// Answers, with the std::regex that stock llama.cpp uses, which of the given names each of the given patterns matches.
//
// Input, repeated until end of file: a 32-bit length and a pattern; a 32-bit count; as many times a 32-bit length and a name.
// Output: a line per pattern: "E" if std::regex refuses it, else per name "1" or "0", or "T" from the first name on that took longer than the
// limit or overflowed the stack.
//
// The same two calls as in llama-model-loader.cpp: std::regex with its default grammar, std::regex_search without flags. std::regex_search
// cannot be interrupted and may recurse without bound, so each pattern has a process of its own.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <regex>
#include <string>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace {

constexpr long LIMIT_MICROSECONDS = 300 * 1000;
constexpr size_t MAX_NAMES = 4096;

bool read_u32(uint32_t & value) { return std::fread(&value, sizeof value, 1, stdin) == 1; }

bool read_text(std::string & text) {
    uint32_t length = 0;
    if (!read_u32(length)) {
        return false;
    }
    text.resize(length);
    return length == 0 || std::fread(text.data(), 1, length, stdin) == length;
}

void answer(const std::string & pattern, const std::vector<std::string> & names, char * out) {
    itimerval timer{};
    timer.it_value.tv_usec = LIMIT_MICROSECONDS;
    setitimer(ITIMER_REAL, &timer, nullptr);
    try {
        const std::regex compiled(pattern);
        for (size_t i = 0; i < names.size(); ++i) {
            out[i] = std::regex_search(names[i], compiled) ? '1' : '0';
        }
    } catch (const std::regex_error &) {
        std::strcpy(out, "E");
    }
}

} // namespace

int main() {
    void * shared = mmap(nullptr, MAX_NAMES + 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) {
        return 1;
    }
    char * out = static_cast<char *>(shared);
    std::string pattern;
    while (read_text(pattern)) {
        uint32_t count = 0;
        if (!read_u32(count) || count > MAX_NAMES) {
            return 1;
        }
        std::vector<std::string> names(count);
        for (std::string & name : names) {
            if (!read_text(name)) {
                return 1;
            }
        }
        std::memset(out, 'T', count);
        out[count] = '\0';
        const pid_t child = fork();
        if (child == 0) {
            answer(pattern, names, out);
            _exit(0);
        }
        if (child < 0 || waitpid(child, nullptr, 0) != child) {
            return 1;
        }
        std::puts(out);
    }
    return 0;
}
