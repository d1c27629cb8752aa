/*
 * The placement decision through berth.h: every row of the table in the documentation, every flag of create_tensor, and every kind of bad input.
 * Prints "N checks" and ends with 0 if all hold.
 */
#include <berth.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int checks, faults;

static void expect(bool holds, const char *what) {
    checks++;
    if (!holds) {
        faults++;
        printf("FAILED %s (last error: %s)\n", what, berth_last_error());
    }
}

/* AUTO: without a GPU, and Berth takes the experts that would go to the CPU. */
enum { CPU_ONLY, GPU_NONE, GPU_ALL, AUTO };

static const struct berth_device cuda = {"CUDA0", "CUDA_Host", 1.0f};

static struct berth_load circumstances(int machine, bool mmap) {
    struct berth_load load = {.struct_size = sizeof load};
    expect(berth_load_init(&load) == BERTH_STATUS_OK, "berth_load_init");
    load.mmap = mmap;
    load.layers = 4;
    load.experts = 128;
    load.experts_used = 8;
    load.offload_min_batch = 32;
    load.auto_experts = machine == AUTO;
    if (machine == GPU_NONE || machine == GPU_ALL) {
        load.devices = &cuda;
        load.n_devices = 1;
        load.gpu_layers = machine == GPU_ALL ? -1 : 0;
    }
    return load;
}

/* What was decided about a tensor with these rules. */
static struct berth_decision decide(const char *name, uint32_t flags, const char *rules_text, struct berth_load load, enum berth_status *status) {
    static const char *const devices[] = {"CUDA0"};
    struct berth_rules *rules = NULL;
    expect(berth_rules_new(devices, 1, &rules) == BERTH_STATUS_OK, "berth_rules_new");
    if (strcmp(rules_text, "--cpu-moe") == 0) {
        expect(berth_rules_cpu_moe(rules) == BERTH_STATUS_OK, "berth_rules_cpu_moe");
    } else if (strcmp(rules_text, "--n-cpu-moe 2") == 0) {
        expect(berth_rules_n_cpu_moe(rules, 2) == BERTH_STATUS_OK, "berth_rules_n_cpu_moe");
    } else if (*rules_text) {
        expect(berth_rules_parse(rules, rules_text) == BERTH_STATUS_OK, rules_text);
    }
    struct berth_tensor_desc tensor = {.struct_size = sizeof tensor, .name = name, .ne = {256, 64, 8, 1}, .ggml_type = 12, .flags = flags};
    struct berth_decision decision;
    memset(&decision, 0x5A, sizeof decision);
    decision.struct_size = sizeof decision;
    *status = berth_decide(&tensor, rules, &load, &decision);
    if (*status == BERTH_STATUS_OK && decision.rule >= 0) {
        struct berth_rule rule = {.struct_size = sizeof rule};
        expect(berth_rules_get(rules, (size_t) decision.rule, &rule) == BERTH_STATUS_OK && rule.matches == 1, "the winner counts one match");
    }
    berth_rules_free(rules);
    return decision;
}

struct row {
    const char *name;
    uint32_t flags;
    const char *rules;
    int machine;
    bool mmap;
    const char *target;
    enum berth_memory memory;
    int rule;
    bool overridden, downgraded;
    const char *reason;
};

#define EXPERT "blk.1.ffn_up_exps.weight"

static const struct row rows[] = {
    /* A rule names a host buffer type: kept, mmap or not. */
    {EXPERT, 0, "exps=CUDA_Host", CPU_ONLY, true, "CUDA_Host", BERTH_MEMORY_PINNED, 0, true, false, "rule_host"},
    {EXPERT, 0, "exps=CUDA_Host", CPU_ONLY, false, "CUDA_Host", BERTH_MEMORY_PINNED, 0, true, false, "rule_host"},
    {EXPERT, 0, "exps=CUDA_Host", GPU_ALL, true, "CUDA_Host", BERTH_MEMORY_PINNED, 0, true, false, "rule_host"},
    {EXPERT, 0, "exps=ARENA", CPU_ONLY, true, "ARENA", BERTH_MEMORY_ARENA, 0, true, false, "rule_host"},
    {EXPERT, 0, "exps=ARENA", GPU_NONE, false, "ARENA", BERTH_MEMORY_ARENA, 0, true, false, "rule_host"},
    {EXPERT, 0, "exps=CPU_MMAP", GPU_ALL, true, "CPU_MMAP", BERTH_MEMORY_MAPPED, 0, true, false, "rule_host"},
    {EXPERT, 0, "exps=CPU_MMAP", CPU_ONLY, false, "CPU_MMAP", BERTH_MEMORY_PAGEABLE, 0, true, false, "rule_host"},
    /* No rule, automatic host type: downgraded with mmap, kept without. */
    {EXPERT, 0, "", GPU_NONE, true, "CPU", BERTH_MEMORY_MAPPED, -1, false, true, "auto_host_mapped"},
    {EXPERT, 0, "", GPU_NONE, false, "CUDA_Host", BERTH_MEMORY_PINNED, -1, false, false, "auto_host"},
    /* No rule, no device. */
    {EXPERT, 0, "", CPU_ONLY, true, "CPU", BERTH_MEMORY_MAPPED, -1, false, false, "auto_cpu"},
    {EXPERT, 0, "", CPU_ONLY, false, "CPU", BERTH_MEMORY_PAGEABLE, -1, false, false, "auto_cpu"},
    /* A rule names CPU: no host override. */
    {EXPERT, 0, "exps=CPU", CPU_ONLY, true, "CPU", BERTH_MEMORY_MAPPED, 0, false, false, "rule_cpu"},
    {EXPERT, 0, "exps=CPU", GPU_ALL, true, "CPU", BERTH_MEMORY_MAPPED, 0, false, true, "rule_cpu_host_mapped"},
    {EXPERT, 0, "exps=CPU", GPU_ALL, false, "CUDA_Host", BERTH_MEMORY_PINNED, 0, false, false, "rule_cpu_host"},
    {EXPERT, 0, "--cpu-moe", CPU_ONLY, true, "CPU", BERTH_MEMORY_MAPPED, 0, false, false, "rule_cpu"},
    {EXPERT, 0, "--n-cpu-moe 2", CPU_ONLY, true, "CPU", BERTH_MEMORY_MAPPED, 1, false, false, "rule_cpu"},
    {"blk.3.ffn_up_exps.weight", 0, "--n-cpu-moe 2", GPU_ALL, true, "CUDA0", BERTH_MEMORY_DEVICE, -1, false, false, "auto_device"},
    /* BERTH_AUTO: experts that would go to the CPU, by rule or without; not their scales and biases. */
    {EXPERT, 0, "", AUTO, true, "CPU_MMAP", BERTH_MEMORY_MAPPED, -1, false, false, "auto_berth"},
    {EXPERT, 0, "", AUTO, false, "CPU_MMAP", BERTH_MEMORY_PAGEABLE, -1, false, false, "auto_berth"},
    {EXPERT, 0, "exps=CPU", AUTO, true, "CPU_MMAP", BERTH_MEMORY_MAPPED, 0, false, false, "rule_cpu_berth"},
    {EXPERT, 0, "--cpu-moe", AUTO, false, "CPU_MMAP", BERTH_MEMORY_PAGEABLE, 0, false, false, "rule_cpu_berth"},
    {EXPERT, 0, "exps=ARENA", AUTO, true, "ARENA", BERTH_MEMORY_ARENA, 0, true, false, "rule_host"},
    {"blk.1.ffn_up_exps.scale", 0, "", AUTO, true, "CPU", BERTH_MEMORY_MAPPED, -1, false, false, "auto_cpu"},
    {"blk.1.ffn_up_exps.bias", 0, "exps=CPU", AUTO, true, "CPU", BERTH_MEMORY_MAPPED, 0, false, false, "rule_cpu"},
    {"blk.1.ffn_up_shexp.weight", 0, "exp=CPU", AUTO, true, "CPU", BERTH_MEMORY_MAPPED, 0, false, false, "rule_cpu"},
    /* A rule names a device: kept, mmap or not. */
    {EXPERT, 0, "exps=CUDA0", GPU_NONE, true, "CUDA0", BERTH_MEMORY_DEVICE, 0, true, false, "rule_device"},
    {EXPERT, 0, "exps=CUDA0", GPU_NONE, false, "CUDA0", BERTH_MEMORY_DEVICE, 0, true, false, "rule_device"},
    /* First match wins. */
    {EXPERT, 0, "ffn_up=ARENA,exps=CUDA_Host", CPU_ONLY, true, "ARENA", BERTH_MEMORY_ARENA, 0, true, false, "rule_host"},
    {EXPERT, 0, "attn=ARENA,exps=CUDA_Host", CPU_ONLY, true, "CUDA_Host", BERTH_MEMORY_PINNED, 1, true, false, "rule_host"},
    /* Flags. */
    {EXPERT, BERTH_TENSOR_MISSING | BERTH_TENSOR_NOT_REQUIRED, "exps=ARENA", CPU_ONLY, true, "", BERTH_MEMORY_NONE, -1, false, false, "absent"},
    {EXPERT, BERTH_TENSOR_SKIP, "exps=ARENA", CPU_ONLY, true, "", BERTH_MEMORY_NONE, -1, false, false, "skipped"},
    {"token_embd.weight", BERTH_TENSOR_DUPLICATED, "", CPU_ONLY, true, "CPU", BERTH_MEMORY_MAPPED, -1, false, false, "duplicated"},
};

static void table(void) {
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct row *r = &rows[i];
        enum berth_status status;
        struct berth_decision d = decide(r->name, r->flags, r->rules, circumstances(r->machine, r->mmap), &status);
        char what[256];
        snprintf(what, sizeof what, "row %zu: %s with \"%s\", got %s / %s / %d / %d / %d / %s", i, r->name, r->rules, d.target,
                 berth_memory_text((int) d.memory), d.rule, d.buft_overridden, d.downgraded, status == BERTH_STATUS_OK ? d.reason : "-");
        expect(status == BERTH_STATUS_OK && strcmp(d.target, r->target) == 0 && d.memory == r->memory && d.rule == r->rule &&
                   d.buft_overridden == r->overridden && d.downgraded == r->downgraded && strcmp(d.reason, r->reason) == 0 && *d.reason_text,
               what);
    }
}

static void thresholds(void) {
    enum berth_status status;
    struct berth_load load = circumstances(GPU_ALL, true);
    struct berth_decision d = decide(EXPERT, 0, "exps=CUDA_Host", load, &status);
    expect(status == BERTH_STATUS_OK && d.offload_min_batch == 32 && d.offload_expert_hint == 32 * 128 / 8, "thresholds of an expert");
    load.offload_min_batch = -1;
    d = decide(EXPERT, 0, "exps=CUDA_Host", load, &status);
    expect(status == BERTH_STATUS_OK && d.offload_min_batch == 0, "no offload when it is off");
    d = decide(EXPERT, 0, "exps=CUDA_Host", circumstances(CPU_ONLY, true), &status);
    expect(status == BERTH_STATUS_OK && d.offload_min_batch == 0, "no offload without a device");
}

static void bad_input(void) {
    enum berth_status status;
    decide(EXPERT, BERTH_TENSOR_MISSING, "", circumstances(CPU_ONLY, true), &status);
    expect(status == BERTH_STATUS_NOT_FOUND && strstr(berth_last_error(), EXPERT), "a required tensor that is missing is named");
    struct berth_decision untouched = decide(EXPERT, 1u << 31, "", circumstances(CPU_ONLY, true), &status);
    expect(status == BERTH_STATUS_INVALID_ARGUMENT, "unknown flags");
    expect(untouched.rule == 0x5A5A5A5A, "outputs are written only on success");

    struct berth_load load = circumstances(CPU_ONLY, true);
    struct berth_tensor_desc tensor = {.struct_size = sizeof tensor, .name = EXPERT, .ne = {256, 64, 8, 1}, .ggml_type = 12};
    struct berth_decision decision = {.struct_size = sizeof decision};
    expect(berth_decide(NULL, NULL, &load, &decision) == BERTH_STATUS_INVALID_ARGUMENT, "tensor NULL");
    expect(berth_decide(&tensor, NULL, NULL, &decision) == BERTH_STATUS_INVALID_ARGUMENT, "load NULL");
    expect(berth_decide(&tensor, NULL, &load, NULL) == BERTH_STATUS_INVALID_ARGUMENT, "decision NULL");
    expect(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_OK, "rules NULL are no rules");
    tensor.name = NULL;
    expect(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_INVALID_ARGUMENT, "name NULL");
    tensor.name = "\xff\xfe";
    expect(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_INVALID_ARGUMENT, "name not UTF-8");
    tensor.name = EXPERT;
    static const int64_t shapes[][4] = {{0, 1, 1, 1}, {-1, 1, 1, 1}, {255, 1, 1, 1}, {INT64_MAX, INT64_MAX, 1, 1}, {256, INT64_MAX, 1, 1}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        memcpy(tensor.ne, shapes[i], sizeof tensor.ne);
        expect(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_INVALID_ARGUMENT, "an impossible shape");
    }
    tensor.ne[0] = 256;
    tensor.ne[1] = 1;
    tensor.ggml_type = 4000000000u;
    expect(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_INVALID_ARGUMENT, "an unknown type");
    tensor.ggml_type = 12;
    tensor.struct_size = 0;
    expect(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_INVALID_ARGUMENT, "struct_size 0");
    tensor.struct_size = sizeof tensor;
    load.repack = 3;
    expect(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_INVALID_ARGUMENT, "an unknown repack");
    load.repack = 0;
    load.n_devices = SIZE_MAX;
    load.devices = &cuda;
    expect(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_INVALID_ARGUMENT, "more devices than memory");

    /* A caller with a shorter struct gets what it knows, and nothing beyond. */
    load = circumstances(CPU_ONLY, true);
    memset(&decision, 0x5A, sizeof decision);
    decision.struct_size = offsetof(struct berth_decision, rule);
    expect(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_OK && strcmp(decision.target, "CPU") == 0, "an older caller");
    expect(decision.rule == 0x5A5A5A5A && decision.struct_size == offsetof(struct berth_decision, rule), "nothing is written beyond its struct");
}

static void bad_rules(void) {
    static const struct {
        const char *text;
        size_t rule, column;
        const char *says;
    } bad[] = {
        {"exps=ARENA,", 2, 12, "no rule"},    {"exps", 1, 1, "="},           {"=ARENA", 1, 1, "empty"},
        {"a=ARENA,(=CPU", 2, 0, ""},          {"exps=ARENAA", 1, 6, "ARENA"}, {"x=CPU,exps=cuda_host", 2, 12, "CUDA_Host"},
    };
    struct berth_rules *rules = NULL;
    expect(berth_rules_new(NULL, 0, &rules) == BERTH_STATUS_OK, "berth_rules_new");
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct berth_error_info info = {.struct_size = sizeof info};
        expect(berth_rules_parse(rules, bad[i].text) == BERTH_STATUS_INVALID_ARGUMENT, bad[i].text);
        expect(berth_last_error_info(&info) == BERTH_STATUS_OK && info.rule == bad[i].rule && strstr(info.message, bad[i].says), bad[i].text);
        char what[128];
        snprintf(what, sizeof what, "%s: column %zu", bad[i].text, info.column);
        expect(bad[i].column == 0 ? info.column > 0 : info.column == bad[i].column, what);
    }
    expect(berth_rules_count(rules) == 0, "a rule that is refused is not appended");
    expect(berth_rules_push(rules, "a,b=c", "ARENA") == BERTH_STATUS_OK && berth_rules_count(rules) == 1, "a pushed rule is not split");
    expect(berth_rules_parse_bench(rules, "a=CPU;b=ARENA,c=CPU", 0) == BERTH_STATUS_OK && berth_rules_count(rules) == 3, "bench: first run");
    expect(berth_rules_parse_bench(rules, "a=CPU;b=ARENA,c=CPU", 2) == BERTH_STATUS_INVALID_ARGUMENT, "bench: there is no third run");
    struct berth_rule rule = {.struct_size = sizeof rule};
    expect(berth_rules_get(rules, 0, &rule) == BERTH_STATUS_OK && strcmp(rule.pattern, "a,b=c") == 0 && strcmp(rule.target, "ARENA") == 0, "get");
    expect(berth_rules_get(rules, 3, &rule) == BERTH_STATUS_INVALID_ARGUMENT, "get beyond the end");
    berth_rules_free(rules);
    berth_rules_free(NULL);
    expect(berth_rules_count(NULL) == 0, "count of NULL");
    expect(berth_rules_parse(NULL, "a=CPU") == BERTH_STATUS_INVALID_ARGUMENT, "parse into NULL");
}

int main(void) {
    table();
    thresholds();
    bad_input();
    bad_rules();
    printf("%d checks, %d failed\n", checks, faults);
    return faults != 0;
}
