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

/* What was to be refused, and whether it was. */
static int misuses;

static void misused(bool refused_so, const char *what) {
    misuses++;
    expect(refused_so, what);
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
    misused(status == BERTH_STATUS_NOT_FOUND && strstr(berth_last_error(), EXPERT), "a required tensor that is missing is named");
    struct berth_decision untouched = decide(EXPERT, 1u << 31, "", circumstances(CPU_ONLY, true), &status);
    misused(status == BERTH_STATUS_INVALID_ARGUMENT && strstr(berth_last_error(), "MISSING 16"), "unknown flags are told with all known ones");
    expect(untouched.rule == 0x5A5A5A5A, "outputs are written only on success");

    struct berth_load load = circumstances(CPU_ONLY, true);
    struct berth_tensor_desc tensor = {.struct_size = sizeof tensor, .name = EXPERT, .ne = {256, 64, 8, 1}, .ggml_type = 12};
    struct berth_decision decision = {.struct_size = sizeof decision};
    misused(berth_decide(NULL, NULL, &load, &decision) == BERTH_STATUS_INVALID_ARGUMENT, "tensor NULL");
    misused(berth_decide(&tensor, NULL, NULL, &decision) == BERTH_STATUS_INVALID_ARGUMENT, "load NULL");
    misused(berth_decide(&tensor, NULL, &load, NULL) == BERTH_STATUS_INVALID_ARGUMENT, "decision NULL");
    expect(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_OK, "rules NULL are no rules");
    tensor.name = NULL;
    misused(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_INVALID_ARGUMENT, "name NULL");
    tensor.name = "\xff\xfe";
    misused(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_INVALID_ARGUMENT, "name not UTF-8");
    tensor.name = EXPERT;
    static const int64_t shapes[][4] = {{-1, 1, 1, 1}, {255, 1, 1, 1}, {INT64_MAX, INT64_MAX, 1, 1}, {256, INT64_MAX, 1, 1}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        memcpy(tensor.ne, shapes[i], sizeof tensor.ne);
        misused(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_INVALID_ARGUMENT, "an impossible shape");
    }
    tensor.ne[0] = 256;
    tensor.ne[1] = 0;
    expect(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_OK, "no elements, as a loader takes them");
    tensor.ne[1] = 1;
    tensor.ggml_type = 200;
    expect(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_OK, "a type to come, as a loader takes it");
    tensor.ggml_type = 4;
    misused(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_INVALID_ARGUMENT, "a type that was taken out");
    tensor.ggml_type = 12;
    tensor.struct_size = 0;
    misused(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_INVALID_ARGUMENT, "struct_size 0");
    tensor.struct_size = sizeof tensor;
    load.repack = 3;
    misused(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_INVALID_ARGUMENT, "an unknown repack");
    load.repack = 0;
    load.n_devices = SIZE_MAX;
    load.devices = &cuda;
    misused(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_INVALID_ARGUMENT, "more devices than memory");

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
        misused(berth_rules_parse(rules, bad[i].text) == BERTH_STATUS_INVALID_ARGUMENT, bad[i].text);
        expect(berth_last_error_info(&info) == BERTH_STATUS_OK && info.rule == bad[i].rule && strstr(info.message, bad[i].says), bad[i].text);
        char what[128];
        snprintf(what, sizeof what, "%s: column %zu", bad[i].text, info.column);
        expect(bad[i].column == 0 ? info.column > 0 : info.column == bad[i].column, what);
    }
    expect(berth_rules_count(rules) == 0, "a rule that is refused is not appended");
    expect(berth_rules_push(rules, "a,b=c", "ARENA") == BERTH_STATUS_OK && berth_rules_count(rules) == 1, "a pushed rule is not split");
    expect(berth_rules_parse_bench(rules, "a=CPU;b=ARENA,c=CPU", 0) == BERTH_STATUS_OK && berth_rules_count(rules) == 3, "bench: first run");
    misused(berth_rules_parse_bench(rules, "a=CPU;b=ARENA,c=CPU", 2) == BERTH_STATUS_INVALID_ARGUMENT, "bench: there is no third run");
    struct berth_rule rule = {.struct_size = sizeof rule};
    expect(berth_rules_get(rules, 0, &rule) == BERTH_STATUS_OK && strcmp(rule.pattern, "a,b=c") == 0 && strcmp(rule.target, "ARENA") == 0, "get");
    misused(berth_rules_get(rules, 3, &rule) == BERTH_STATUS_INVALID_ARGUMENT, "get beyond the end");
    berth_rules_free(rules);
    berth_rules_free(NULL);
    expect(berth_rules_count(NULL) == 0, "count of NULL");
    misused(berth_rules_parse(NULL, "a=CPU") == BERTH_STATUS_INVALID_ARGUMENT, "parse into NULL");
}

/*
 * Circumstances that the table above has not: repacking, lazy tensors, --no-host, several devices with shares, and tensors of other shapes. The
 * model has 4 layers, with their output; what a row leaves at 0 is as in `circumstances` on a machine with two GPUs and every layer on them.
 */
struct circumstance {
    const char *name, *rules;
    uint32_t flags;
    /* 0: that of an expert of Q4_K; else elements per dimension and type. */
    int64_t ne[4];
    uint32_t type;
    /* Devices, at most 3, and whether they have no host type. */
    size_t devices;
    float share[3];
    bool no_host_type;
    /* As in struct berth_load; gpu_layers is one more, so that 0 is all. */
    int32_t gpu_layers_and_1;
    uint8_t repack, lazy;
    bool no_host, unmapped;
    const char *target;
    enum berth_memory memory;
    int rule;
    bool downgraded;
    const char *reason;
};

#define REPACKED .target = "CPU", .memory = BERTH_MEMORY_REPACKED
#define MAPPED .target = "CPU", .memory = BERTH_MEMORY_MAPPED
#define DOWNGRADED(winner, why) MAPPED, .rule = winner, .downgraded = true, .reason = why
#define PAGEABLE .target = "CPU", .memory = BERTH_MEMORY_PAGEABLE
#define ON(device) .target = device, .memory = BERTH_MEMORY_DEVICE, .rule = -1, .reason = "auto_device"
#define CPU_REPACK .rule = -1, .reason = "auto_cpu_repack"
#define AUTO_CPU .rule = -1, .reason = "auto_cpu"
#define LAZY .rule = -1, .reason = "lazy"
#define Q(layer) "blk." #layer ".attn_q.weight"
#define UP(layer) "blk." #layer ".ffn_up_exps.weight"
#define PER_LAYER "per_layer_token_embd.weight"
#define DENSE .ne = {256, 64, 1, 1}, .type = 12
#define F16(rows) .ne = {1 << 20, rows, 1, 1}, .type = 1

static const struct circumstance special[] = {
    /* llama.cpp interleaves: by itself, or by a rule that names CPU; mapped or not. Not what a rule keeps elsewhere. */
    {.name = EXPERT, .rules = "", .repack = 1, REPACKED, CPU_REPACK},
    {.name = EXPERT, .rules = "", .repack = 2, .unmapped = true, REPACKED, CPU_REPACK},
    {.name = EXPERT, .rules = "exps=CPU", .repack = 1, REPACKED, .rule = 0, .reason = "rule_cpu_repack"},
    {.name = EXPERT, .rules = "--cpu-moe", .repack = 2, .unmapped = true, REPACKED, .rule = 0, .reason = "rule_cpu_repack"},
    {.name = EXPERT, .rules = "exps=CPU", MAPPED, .rule = 0, .reason = "rule_cpu"},
    {.name = EXPERT, .rules = "exps=CPU_MMAP", .repack = 2, .target = "CPU_MMAP", .memory = BERTH_MEMORY_MAPPED, .rule = 0, .reason = "rule_host"},
    {.name = Q(1), DENSE, .rules = "", .repack = 1, REPACKED, CPU_REPACK},
    /* By format, by CPU, by rows, by use. */
    {.name = Q(1), .ne = {256, 64, 1, 1}, .type = 14, .rules = "", .repack = 2, MAPPED, AUTO_CPU},
    {.name = Q(1), .ne = {256, 64, 1, 1}, .type = 10, .rules = "", .repack = 1, MAPPED, AUTO_CPU},
    {.name = Q(1), .ne = {256, 64, 1, 1}, .type = 10, .rules = "", .repack = 2, REPACKED, CPU_REPACK},
    {.name = Q(1), .ne = {256, 60, 1, 1}, .type = 12, .rules = "", .repack = 2, MAPPED, AUTO_CPU},
    {.name = "token_embd.weight", DENSE, .rules = "", .repack = 2, MAPPED, AUTO_CPU},
    /* A GPU's page-locked type comes first, unless it is not considered, or there is none. */
    {.name = EXPERT, .rules = "", .devices = 1, .gpu_layers_and_1 = 1, .repack = 1, DOWNGRADED(-1, "auto_host_mapped")},
    {.name = EXPERT, .rules = "", .devices = 1, .gpu_layers_and_1 = 1, .repack = 1, .no_host = true, REPACKED, CPU_REPACK},
    {.name = EXPERT, .rules = "", .devices = 1, .gpu_layers_and_1 = 1, .repack = 1, .no_host_type = true, REPACKED, CPU_REPACK},
    {.name = EXPERT, .rules = "", .devices = 1, .gpu_layers_and_1 = 1, .no_host = true, MAPPED, AUTO_CPU},
    {.name = EXPERT, .rules = "", .devices = 1, .gpu_layers_and_1 = 1, .no_host = true, .unmapped = true, PAGEABLE, AUTO_CPU},
    {.name = EXPERT, .rules = "exps=CPU", .devices = 1, .no_host = true, MAPPED, .rule = 0, .reason = "rule_cpu"},
    {.name = EXPERT, .rules = "exps=CPU", .devices = 1, .no_host = true, .unmapped = true, PAGEABLE, .rule = 0, .reason = "rule_cpu"},
    /* No graph uses it, whatever a rule says. */
    {.name = "masked_embd_ordering.weight", .ne = {8, 1, 1, 1}, .type = 0, .rules = ".=ARENA", .target = "", .rule = -1, .reason = "unused"},
    {.name = "masked_embd_ordering.weight", .ne = {8, 1, 1, 1}, .type = 0, .rules = "", .devices = 1, .target = "", .rule = -1, .reason = "unused"},
    /* Rows that are read when they are needed: if it may be so, above 4 GiB, never, always. Mapped even without mmap; no rule is asked. */
    {.name = PER_LAYER, F16(2049), .flags = BERTH_TENSOR_READ_LAZY, .rules = ".=ARENA", MAPPED, LAZY},
    {.name = PER_LAYER, F16(2049), .flags = BERTH_TENSOR_READ_LAZY, .rules = ".=ARENA", .unmapped = true, MAPPED, LAZY},
    {.name = PER_LAYER, F16(2049), .rules = "", .unmapped = true, PAGEABLE, AUTO_CPU},
    {.name = PER_LAYER, F16(2048), .flags = BERTH_TENSOR_READ_LAZY, .rules = "", .unmapped = true, PAGEABLE, AUTO_CPU},
    {.name = PER_LAYER, F16(2049), .flags = BERTH_TENSOR_READ_LAZY, .rules = "", .lazy = 1, .unmapped = true, PAGEABLE, AUTO_CPU},
    {.name = PER_LAYER, F16(1), .flags = BERTH_TENSOR_READ_LAZY, .rules = "", .lazy = 2, .unmapped = true, MAPPED, LAZY},
    {.name = PER_LAYER, F16(1), .rules = "", .lazy = 2, .unmapped = true, PAGEABLE, AUTO_CPU},
    /* Several devices: what goes to them is shared out in order, by their shares, evenly if there are none. The output is behind the last layer. */
    {.name = Q(1), DENSE, .rules = "", .devices = 2, .share = {1, 1}, ON("CUDA0")},
    {.name = Q(2), DENSE, .rules = "", .devices = 2, .share = {1, 1}, ON("CUDA0")},
    {.name = Q(3), DENSE, .rules = "", .devices = 2, .share = {1, 1}, ON("CUDA1")},
    {.name = "output.weight", DENSE, .rules = "", .devices = 2, .share = {1, 1}, ON("CUDA1")},
    {.name = Q(0), DENSE, .rules = "", .devices = 2, .share = {1, 4}, ON("CUDA0")},
    {.name = Q(1), DENSE, .rules = "", .devices = 2, .share = {1, 4}, ON("CUDA1")},
    {.name = Q(3), DENSE, .rules = "", .devices = 2, .share = {4, 1}, ON("CUDA0")},
    {.name = "output.weight", DENSE, .rules = "", .devices = 2, .share = {4, 1}, ON("CUDA1")},
    {.name = Q(0), DENSE, .rules = "", .devices = 2, .share = {0, 1}, ON("CUDA1")},
    {.name = "output.weight", DENSE, .rules = "", .devices = 2, .share = {1, 0}, ON("CUDA0")},
    {.name = Q(2), DENSE, .rules = "", .devices = 2, ON("CUDA0")},
    {.name = Q(3), DENSE, .rules = "", .devices = 2, ON("CUDA1")},
    {.name = Q(1), DENSE, .rules = "", .devices = 3, .share = {1, 3, 1}, ON("CUDA1")},
    {.name = Q(3), DENSE, .rules = "", .devices = 3, .share = {1, 3, 1}, ON("CUDA1")},
    {.name = "output.weight", DENSE, .rules = "", .devices = 3, .share = {1, 3, 1}, ON("CUDA2")},
    /* With two layers and the output on them, two thirds are layers. What is before them is the CPU's, with the first host type. */
    {.name = Q(1), DENSE, .rules = "", .devices = 2, .share = {2, 1}, .gpu_layers_and_1 = 4, DOWNGRADED(-1, "auto_host_mapped")},
    {.name = Q(2), DENSE, .rules = "", .devices = 2, .share = {2, 1}, .gpu_layers_and_1 = 4, ON("CUDA0")},
    {.name = Q(3), DENSE, .rules = "", .devices = 2, .share = {2, 1}, .gpu_layers_and_1 = 4, ON("CUDA0")},
    {.name = "output.weight", DENSE, .rules = "", .devices = 2, .share = {2, 1}, .gpu_layers_and_1 = 4, ON("CUDA1")},
    {.name = "output.weight", DENSE, .rules = "", .devices = 2, .share = {1, 1}, .gpu_layers_and_1 = 2, ON("CUDA0")},
    {.name = Q(0), DENSE, .rules = "attn=CUDA1", .devices = 2, .target = "CUDA1", .memory = BERTH_MEMORY_DEVICE, .reason = "rule_device"},
    /* --n-cpu-moe n: layers 0 to n - 1, and no other; more than the model has does no harm. Likewise --n-cpu-ffn. */
    {.name = UP(0), .rules = "--n-cpu-moe 2", .devices = 1, DOWNGRADED(0, "rule_cpu_host_mapped")},
    {.name = UP(1), .rules = "--n-cpu-moe 2", .devices = 1, DOWNGRADED(1, "rule_cpu_host_mapped")},
    {.name = UP(2), .rules = "--n-cpu-moe 2", .devices = 1, ON("CUDA0")},
    {.name = UP(0), .rules = "--n-cpu-moe 0", .devices = 1, ON("CUDA0")},
    {.name = UP(3), .rules = "--n-cpu-moe 5", .devices = 1, DOWNGRADED(3, "rule_cpu_host_mapped")},
    {.name = Q(0), DENSE, .rules = "--n-cpu-moe 5", .devices = 1, ON("CUDA0")},
    {.name = "blk.1.ffn_up.weight", DENSE, .rules = "--n-cpu-ffn 2", .devices = 1, DOWNGRADED(1, "rule_cpu_host_mapped")},
    {.name = "blk.2.ffn_up.weight", DENSE, .rules = "--n-cpu-ffn 2", .devices = 1, ON("CUDA0")},
};

static void circumstances_table(void) {
    static const char *const names[] = {"CUDA0", "CUDA1", "CUDA2"};
    for (size_t i = 0; i < sizeof special / sizeof *special; i++) {
        const struct circumstance *c = &special[i];
        struct berth_device devices[3];
        for (size_t d = 0; d < c->devices; d++) {
            devices[d] = (struct berth_device){.name = names[d], .host_type = c->no_host_type ? NULL : "CUDA_Host", .share = c->share[d]};
        }
        struct berth_load load = circumstances(CPU_ONLY, !c->unmapped);
        load.devices = c->devices > 0 ? devices : NULL;
        load.n_devices = c->devices;
        load.gpu_layers = c->gpu_layers_and_1 - 1;
        load.repack = c->repack;
        load.lazy = c->lazy;
        load.no_host = c->no_host;

        struct berth_rules *rules = NULL;
        expect(berth_rules_new(names, 3, &rules) == BERTH_STATUS_OK, "berth_rules_new");
        unsigned n = 0;
        size_t expected = 1;
        enum berth_status made = BERTH_STATUS_OK;
        if (strcmp(c->rules, "--cpu-moe") == 0) {
            made = berth_rules_cpu_moe(rules);
        } else if (sscanf(c->rules, "--n-cpu-moe %u", &n) == 1) {
            made = berth_rules_n_cpu_moe(rules, n);
            expected = n;
        } else if (sscanf(c->rules, "--n-cpu-ffn %u", &n) == 1) {
            made = berth_rules_n_cpu_ffn(rules, n);
            expected = n;
        } else if (*c->rules) {
            made = berth_rules_parse(rules, c->rules);
        } else {
            expected = 0;
        }
        expect(made == BERTH_STATUS_OK && berth_rules_count(rules) == expected, c->rules);

        struct berth_tensor_desc tensor = {.struct_size = sizeof tensor, .name = c->name, .ne = {256, 64, 8, 1}, .ggml_type = 12, .flags = c->flags};
        if (c->ne[0] > 0) {
            memcpy(tensor.ne, c->ne, sizeof tensor.ne);
            tensor.ggml_type = c->type;
        }
        struct berth_decision d = {.struct_size = sizeof d};
        enum berth_status status = berth_decide(&tensor, rules, &load, &d);
        char what[256];
        snprintf(what, sizeof what, "circumstance %zu: %s with \"%s\", got %s / %s / %d / %d / %s", i, c->name, c->rules, d.target,
                 berth_memory_text((int) d.memory), d.rule, d.downgraded, status == BERTH_STATUS_OK ? d.reason : "-");
        bool overridden = c->rule == 0 && strncmp(c->reason, "rule_", 5) == 0 && strncmp(c->reason, "rule_cpu", 8) != 0;
        expect(status == BERTH_STATUS_OK && strcmp(d.target, c->target) == 0 && d.memory == c->memory && d.rule == c->rule &&
                   d.buft_overridden == overridden && d.downgraded == c->downgraded && strcmp(d.reason, c->reason) == 0 && *d.reason_text,
               what);
        berth_rules_free(rules);
    }
}

/* Only what was decided counts. */
static void matches(void) {
    struct berth_rules *rules = NULL;
    struct berth_rule rule = {.struct_size = sizeof rule};
    struct berth_load load = circumstances(CPU_ONLY, true);
    struct berth_tensor_desc tensor = {.struct_size = sizeof tensor, .name = EXPERT, .ne = {256, 64, 8, 1}, .ggml_type = 12};
    struct berth_decision decision = {.struct_size = 3};
    expect(berth_rules_new(NULL, 0, &rules) == BERTH_STATUS_OK && berth_rules_parse(rules, "exps=ARENA") == BERTH_STATUS_OK, "one rule");
    misused(berth_decide(&tensor, rules, &load, NULL) == BERTH_STATUS_INVALID_ARGUMENT, "no place for the decision");
    misused(berth_decide(&tensor, rules, &load, &decision) == BERTH_STATUS_INVALID_ARGUMENT, "a bad place for the decision");
    expect(berth_rules_get(rules, 0, &rule) == BERTH_STATUS_OK && rule.matches == 0, "no match is counted");
    decision.struct_size = sizeof decision;
    expect(berth_decide(&tensor, rules, &load, &decision) == BERTH_STATUS_OK, "a decision");
    expect(berth_decide(&tensor, rules, &load, &decision) == BERTH_STATUS_OK, "and a second one");
    expect(berth_rules_get(rules, 0, &rule) == BERTH_STATUS_OK && rule.matches == 2, "are two matches");
    berth_rules_free(rules);
}

/* Whether a tensor without rules is refused in these circumstances, with these words. */
static bool refused(const struct berth_load *load, const char *says) {
    struct berth_tensor_desc tensor = {.struct_size = sizeof tensor, .name = EXPERT, .ne = {256, 64, 8, 1}, .ggml_type = 12};
    struct berth_decision decision = {.struct_size = sizeof decision};
    return berth_decide(&tensor, NULL, load, &decision) == BERTH_STATUS_INVALID_ARGUMENT && strstr(berth_last_error(), says);
}

/* Devices that no load has, and layers that are not known. */
static void bad_devices(void) {
    struct berth_device devices[2] = {cuda, {"CUDA1", NULL, 1.0f}};
    struct berth_load load = circumstances(GPU_ALL, true);
    load.devices = devices;
    load.n_devices = 2;
    static const struct {
        const char *name, *says;
    } names[] = {
        {"", "empty"},           {"a=b", "'='"},           {"a\x1b", "control"},        {"CPU", "host memory"},    {"cpu", "host memory"},
        {"ARENA", "host memory"}, {"CPU_MMAP", "host memory"}, {"CUDA_Host", "host memory"}, {"CUDA0", "named twice"}, {"cuda0", "named twice"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        devices[1].name = names[i].name;
        misused(refused(&load, names[i].says), names[i].says);
    }
    devices[1].name = "CUDA1";
    static const struct {
        const char *host_type, *says;
    } hosts[] = {{"", "host type of a device is empty"}, {"a=b", "'='"}, {"a=b,\x1b", "control"}, {"ARENA", "page-locked"}};
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
        devices[1].host_type = hosts[i].host_type;
        misused(refused(&load, hosts[i].says), hosts[i].says);
    }
    devices[1].host_type = "CUDA_Host";
    struct berth_tensor_desc tensor = {.struct_size = sizeof tensor, .name = EXPERT, .ne = {256, 64, 8, 1}, .ggml_type = 12};
    struct berth_decision decision = {.struct_size = sizeof decision};
    expect(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_OK, "two good devices");

    /* berth_load_init leaves 0 layers; which of them are on a device is then not known. */
    load.layers = 0;
    misused(refused(&load, "set layers"), "devices, and no layers");
    load.gpu_layers = 1;
    misused(refused(&load, "set layers"), "one layer on devices, and no layers");
    load.gpu_layers = 0;
    expect(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_OK && strcmp(decision.target, "CPU") == 0, "no layer on devices");
    load = circumstances(CPU_ONLY, true);
    load.layers = 0;
    expect(berth_decide(&tensor, NULL, &load, &decision) == BERTH_STATUS_OK, "no layers, and no devices");
}

int main(void) {
    table();
    circumstances_table();
    matches();
    bad_devices();
    thresholds();
    bad_input();
    bad_rules();
    printf("misuse: %d cases\n%d checks, %d failed\n", misuses, checks, faults);
    return faults != 0;
}
