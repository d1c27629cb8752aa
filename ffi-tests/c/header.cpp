// berth.h as a C++ program sees it: included twice, alone, and every function called in a process without ggml.
#include <berth.h>
#include <berth.h>

#include <cstdio>
#include <cstring>

int main() {
    berth_log_set(nullptr, nullptr);
    char *json = nullptr;
    const bool ok = std::strlen(berth_version()) >= 5 && std::strcmp(berth_status_text(BERTH_STATUS_OK), "ok") == 0 &&
                    std::strcmp(berth_status_text(-1), "unknown status") == 0 && berth_last_error()[0] == '\0' && berth_reg() == nullptr &&
                    berth_buft_cpu_mmap() == nullptr && berth_buft_cuda_host() == nullptr && berth_buft_arena() == nullptr &&
                    std::strstr(berth_last_error(), "no ggml in this process") != nullptr &&
                    berth_report_json(nullptr) == BERTH_STATUS_INVALID_ARGUMENT && std::strstr(berth_last_error(), "NULL") != nullptr &&
                    berth_report_json(&json) == BERTH_STATUS_OK && json != nullptr && json[0] == '{';
    berth_string_free(json);
    berth_string_free(nullptr);
    std::puts(ok ? "ok" : "failed");
    return ok ? 0 : 1;
}
