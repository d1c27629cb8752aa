/*
 * Every slot that Berth fills in ggml's tables, called through the real ggml and, where the host checks or shortcuts a call, directly.
 *
 *     vtable_peer LIBBERTH SEED types|bytes|copies|limits|random
 *     vtable_peer LIBBERTH SEED borrowed FILE
 *
 * Compiled once per layout of the tables: PEER_2D says that the headers have the 2-D copies. Every buffer has a shadow in ordinary memory;
 * after every step all its bytes are compared, those between the tensors too.
 */
#include "peer.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { N_TYPES = 3, N_TENSORS = 7, SLOP = 192 };
static const char *const NAMES[N_TYPES] = {"CPU_MMAP", "CUDA_Host", "ARENA"};

static struct {
    ggml_backend_dev_t device;
    ggml_backend_buffer_type_t type;
} places[N_TYPES];

/* A buffer with the same tensors as every other box, and what its bytes should be. */
struct box {
    const char *name;
    ggml_backend_buffer_t buffer;
    struct ggml_context *context;
    struct ggml_tensor *tensors[N_TENSORS]; /* the last two are views: of a whole tensor, and of a part of one */
    uint8_t *base, *shadow;
    size_t size;
};

static size_t offset_in(const struct box *box, const struct ggml_tensor *t) { return (size_t)((uint8_t *)t->data - box->base); }

static void expect_shadow(const struct box *box, int line) {
    checks++;
    if (memcmp(box->base, box->shadow, box->size) == 0) {
        return;
    }
    size_t at = 0;
    while (box->base[at] == box->shadow[at]) {
        at++;
    }
    failures++;
    printf("FAILED at line %d: %s: byte %zu of %zu is %02x, not %02x\n", line, box->name, at, box->size, box->base[at], box->shadow[at]);
    exit(1);
}
#define SAME(box) expect_shadow(box, __LINE__)

static struct box make_box(const char *name, ggml_backend_buffer_type_t type) {
    struct box box = {.name = name};
    box.context = ggml_init((struct ggml_init_params){.mem_size = 64 * ggml_tensor_overhead(), .no_alloc = true});
    const struct {
        enum ggml_type type;
        int64_t columns, rows;
    } shapes[] = {{GGML_TYPE_F32, 16, 9}, {GGML_TYPE_F16, 33, 5}, {GGML_TYPE_Q8_0, 64, 7}, {GGML_TYPE_Q4_K, 512, 3}, {GGML_TYPE_I8, 1, 1}};
    /* Between the tensors, before the first and after the last one are bytes that belong to none. */
    size_t align = ggml_backend_buft_get_alignment(type), at = align, offsets[N_TENSORS];
    for (int i = 0; i < N_TENSORS - 2; i++) {
        box.tensors[i] = ggml_new_tensor_2d(box.context, shapes[i].type, shapes[i].columns, shapes[i].rows);
        offsets[i] = at;
        at += (ggml_nbytes(box.tensors[i]) + SLOP + align - 1) / align * align;
    }
    box.size = at + 17;
    box.buffer = ggml_backend_buft_alloc_buffer(type, box.size);
    REQUIRE(box.buffer != NULL, "%s: no buffer of %zu bytes: %s", name, box.size, last_error);
    box.base = ggml_backend_buffer_get_base(box.buffer);
    for (int i = 0; i < N_TENSORS - 2; i++) {
        ggml_format_name(box.tensors[i], "blk.%d.ffn_up_exps.weight", i);
        CHECK(ggml_backend_tensor_alloc(box.buffer, box.tensors[i], box.base + offsets[i]) == GGML_STATUS_SUCCESS, "%s: tensor %d", name, i);
    }
    box.tensors[N_TENSORS - 2] = ggml_view_1d(box.context, box.tensors[0], ggml_nelements(box.tensors[0]), 0);
    box.tensors[N_TENSORS - 1] = ggml_view_1d(box.context, box.tensors[0], 50, 12);
    for (int i = N_TENSORS - 2; i < N_TENSORS; i++) {
        CHECK(ggml_backend_view_init(box.tensors[i]) == GGML_STATUS_SUCCESS, "%s: view %d", name, i);
    }
    box.shadow = malloc(box.size);
    random_bytes(box.shadow, box.size);
    memcpy(box.base, box.shadow, box.size); /* host memory: plain stores work */
    SAME(&box);
    return box;
}

static void free_box(struct box *box) {
    SAME(box);
    ggml_backend_buffer_free(box->buffer);
    ggml_free(box->context);
    free(box->shadow);
}

/* ---- one step on a tensor and on the shadow; `direct` goes past the host's function to the slot ---- */

static void step_set(struct box *box, struct ggml_tensor *t, size_t offset, size_t size, bool direct) {
    uint8_t *data = malloc(size + 1);
    random_bytes(data, size);
    if (direct) {
        box->buffer->iface.set_tensor(box->buffer, t, data, offset, size);
    } else {
        ggml_backend_tensor_set(t, data, offset, size);
    }
    memcpy(box->shadow + offset_in(box, t) + offset, data, size);
    free(data);
    SAME(box);
}

static void step_get(struct box *box, const struct ggml_tensor *t, size_t offset, size_t size, bool direct) {
    uint8_t *data = malloc(size + 16), around[16];
    random_bytes(data, size + 16);
    memcpy(around, data, 8);
    memcpy(around + 8, data + 8 + size, 8);
    if (direct) {
        box->buffer->iface.get_tensor(box->buffer, t, data + 8, offset, size);
    } else {
        ggml_backend_tensor_get(t, data + 8, offset, size);
    }
    CHECK(memcmp(data + 8, box->shadow + offset_in(box, t) + offset, size) == 0, "%s: get of %zu at %zu", box->name, size, offset);
    CHECK(memcmp(around, data, 8) == 0 && memcmp(around + 8, data + 8 + size, 8) == 0, "%s: get wrote beside its target", box->name);
    free(data);
    SAME(box);
}

static void step_memset(struct box *box, struct ggml_tensor *t, size_t offset, size_t size, bool direct) {
    uint8_t value = (uint8_t)random_u64();
    if (direct) {
        box->buffer->iface.memset_tensor(box->buffer, t, value, offset, size);
    } else {
        ggml_backend_tensor_memset(t, value, offset, size);
    }
    memset(box->shadow + offset_in(box, t) + offset, value, size);
    SAME(box);
}

static void step_clear(struct box *box, uint8_t value, bool direct) {
    if (direct) {
        box->buffer->iface.clear(box->buffer, value);
    } else {
        ggml_backend_buffer_clear(box->buffer, value);
    }
    memset(box->shadow, value, box->size);
    SAME(box);
}

#ifdef PEER_2D
/* `count` pieces of `size` bytes, `stride` apart in the tensor and `far` apart outside. */
static void step_2d(struct box *box, struct ggml_tensor *t, size_t offset, size_t size, size_t count, size_t stride, size_t far, bool set,
                    bool direct) {
    size_t length = count == 0 ? 1 : far * (count - 1) + size + 1;
    uint8_t *data = malloc(length), *want = malloc(length);
    random_bytes(data, length);
    memcpy(want, data, length);
    uint8_t *shadow = box->shadow + offset_in(box, t) + offset;
    for (size_t i = 0; i < count; i++) {
        set ? memcpy(shadow + i * stride, data + i * far, size) : memcpy(want + i * far, shadow + i * stride, size);
    }
    if (set && direct) {
        box->buffer->iface.set_tensor_2d(box->buffer, t, data, offset, size, count, stride, far);
    } else if (set) {
        ggml_backend_tensor_set_2d(t, data, offset, size, count, stride, far);
    } else if (direct) {
        box->buffer->iface.get_tensor_2d(box->buffer, t, data, offset, size, count, stride, far);
    } else {
        ggml_backend_tensor_get_2d(t, data, offset, size, count, stride, far);
    }
    CHECK(memcmp(data, want, length) == 0, "%s: 2-D %s of %zu x %zu", box->name, set ? "set" : "get", count, size);
    free(data);
    free(want);
    SAME(box);
}

static void random_2d(struct box *box, bool set, bool direct) {
    struct ggml_tensor *t = box->tensors[random_below(N_TENSORS)];
    size_t n = ggml_nbytes(t), offset = random_below(n), count = 1 + random_below(6), room = (n - offset) / count;
    size_t size = random_below(room + 1), stride = size + random_below(room - size + 1);
    step_2d(box, t, offset, size, count, stride, size + random_below(9), set, direct);
}
#endif

static void step_copy(struct box *from, struct box *to, int i, bool direct) {
    struct ggml_tensor *src = from->tensors[i], *dst = to->tensors[i];
    if (direct) {
        CHECK(to->buffer->iface.cpy_tensor(to->buffer, src, dst), "%s to %s: not copied", from->name, to->name);
    } else {
        ggml_backend_tensor_copy(src, dst);
    }
    memcpy(to->shadow + offset_in(to, dst), from->shadow + offset_in(from, src), ggml_nbytes(src));
    SAME(from);
    SAME(to);
}

/* ---- what is tested ---- */

/* Registry, devices, buffer types and backends: names, kinds, promises. */
static void test_types(ggml_backend_reg_t reg) {
    CHECK(strcmp(ggml_backend_reg_name(reg), "BERTH") == 0, "%s", ggml_backend_reg_name(reg));
    CHECK(ggml_backend_reg_dev_count(reg) == N_TYPES, "%zu devices", ggml_backend_reg_dev_count(reg));
    CHECK(reg->iface.get_device(reg, N_TYPES) == NULL && reg->iface.get_device(reg, SIZE_MAX) == NULL, "a device past the last one");
    CHECK(ggml_backend_reg_get_proc_address(reg, "no_such_function") == NULL, "an unknown function");
    CHECK(reg->iface.get_proc_address(reg, NULL) == NULL, "a function without a name");
    struct ggml_backend_feature *(*features)(ggml_backend_reg_t) = NULL;
    *(void **)(&features) = ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features");
    REQUIRE(features != NULL, "no features");
    for (struct ggml_backend_feature *f = features(reg); f->name != NULL; f++) {
        CHECK(f->value != NULL && f->value[0] != 0, "the feature %s has no value", f->name);
    }
    struct ggml_context *context = ggml_init((struct ggml_init_params){.mem_size = 1 << 20, .no_alloc = true});
    struct ggml_tensor *a = ggml_new_tensor_2d(context, GGML_TYPE_Q4_K, 512, 3), *sum = ggml_add(context, a, a);
    for (int i = 0; i < N_TYPES; i++) {
        ggml_backend_dev_t device = places[i].device;
        ggml_backend_buffer_type_t type = places[i].type;
        const char *name = i == 0 ? "BERTH" : NAMES[i];
        CHECK(strcmp(ggml_backend_dev_name(device), name) == 0, "%s is called %s", name, ggml_backend_dev_name(device));
        CHECK(strlen(ggml_backend_dev_description(device)) > 0, "%s has no description", name);
        CHECK(ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_ACCEL, "%s is of type %d", name, ggml_backend_dev_type(device));
        CHECK(ggml_backend_dev_backend_reg(device) == reg, "%s is of another registry", name);
        size_t available = 1, total = 1;
        ggml_backend_dev_memory(device, &available, &total);
        CHECK(available == 0 && total == 0, "%s counts host memory a second time", name);
        struct ggml_backend_dev_props props;
        memset(&props, 0xff, sizeof props);
        ggml_backend_dev_get_props(device, &props);
        CHECK(strcmp(props.name, name) == 0 && props.type == GGML_BACKEND_DEVICE_TYPE_ACCEL, "%s: other properties", name);
        CHECK(props.device_id == NULL && strlen(props.description) > 0 && props.memory_total == 0, "%s: other properties", name);
        CHECK(!props.caps.async && !props.caps.host_buffer && !props.caps.events, "%s can what it cannot", name);
        CHECK(props.caps.buffer_from_host_ptr == (i == 0), "%s and the loader's mapping", name);
        CHECK(ggml_backend_dev_host_buffer_type(device) == NULL, "%s has a host type, which the loader downgrades", name);
        CHECK(!ggml_backend_dev_supports_op(device, sum), "%s claims an operation", name);
        CHECK(!ggml_backend_dev_offload_op(device, sum), "%s takes operations from the CPU", name);
        CHECK(ggml_backend_dev_supports_buft(device, ggml_backend_cpu_buffer_type()), "%s cannot read host memory", name);
        CHECK(!device->iface.supports_buft(device, NULL), "%s can read no type at all", name);

        CHECK(strcmp(ggml_backend_buft_name(type), NAMES[i]) == 0, "%s is called %s", NAMES[i], ggml_backend_buft_name(type));
        CHECK(ggml_backend_buft_get_device(type) == device, "%s is of another device", NAMES[i]);
        CHECK(ggml_backend_buft_is_host(type), "%s is not host memory", NAMES[i]);
        CHECK(ggml_backend_buft_get_alignment(type) == (i == 1 ? 4096 : 64), "%s aligns to %zu", NAMES[i], ggml_backend_buft_get_alignment(type));
        CHECK(ggml_backend_buft_get_max_size(type) == SIZE_MAX, "%s has a largest size", NAMES[i]);
        CHECK(ggml_backend_buft_get_alloc_size(type, a) == ggml_nbytes(a), "%s pads tensors", NAMES[i]);
        for (int j = 0; j < N_TYPES; j++) {
            CHECK(ggml_backend_dev_supports_buft(device, places[j].type), "%s cannot read %s", name, NAMES[j]);
        }

        ggml_backend_t backend = ggml_backend_dev_init(device, NULL);
        REQUIRE(backend != NULL, "%s has no backend", name);
        CHECK(strlen(ggml_backend_name(backend)) > 0 && ggml_backend_guid(backend) != NULL, "%s: no name or GUID", name);
        CHECK(ggml_backend_get_device(backend) == device, "%s: the backend is of another device", name);
        CHECK(ggml_backend_get_default_buffer_type(backend) == type, "%s: another default type", name);
        CHECK(ggml_backend_supports_buft(backend, type) && !ggml_backend_supports_op(backend, sum), "%s: backend and device differ", name);
        ggml_backend_synchronize(backend);
        struct ggml_cgraph *graph = ggml_new_graph(context);
        CHECK(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS, "%s: an empty graph", name);
        ggml_build_forward_expand(graph, sum);
        /* What was never claimed goes to the CPU backend, which this program does not load. */
        REFUSED(CHECK(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_FAILED, "computed"), "'node_0' was never claimed, and this ggml has no");
        struct box box = make_box(NAMES[i], type);
        uint8_t data[10];
        random_bytes(data, sizeof data);
        ggml_backend_tensor_set_async(backend, box.tensors[1], data, 3, sizeof data);
        memcpy(box.shadow + offset_in(&box, box.tensors[1]) + 3, data, sizeof data);
        ggml_backend_tensor_get_async(backend, box.tensors[1], data, 4, sizeof data);
        CHECK(memcmp(data, box.shadow + offset_in(&box, box.tensors[1]) + 4, sizeof data) == 0, "%s: an asynchronous get", name);
        free_box(&box);
        ggml_backend_free(backend);
    }
    ggml_free(context);
}

/* set, get, memset, clear: the whole tensor, its ends, and random parts of it. */
static void test_bytes(void) {
    for (int i = 0; i < N_TYPES; i++) {
        struct box box = make_box(NAMES[i], places[i].type);
        CHECK(ggml_backend_buffer_get_size(box.buffer) == box.size, "%s: another size", box.name);
        CHECK(ggml_backend_buffer_is_host(box.buffer) && ggml_backend_buffer_get_type(box.buffer) == places[i].type, "%s: type", box.name);
        CHECK((uintptr_t)box.base % ggml_backend_buffer_get_alignment(box.buffer) == 0, "%s: base %p", box.name, (void *)box.base);
        ggml_backend_buffer_set_usage(box.buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        CHECK(ggml_backend_buffer_get_usage(box.buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS, "%s: usage", box.name);
        ggml_backend_buffer_reset(box.buffer);
        SAME(&box);
        for (int j = 0; j < N_TENSORS; j++) {
            struct ggml_tensor *t = box.tensors[j];
            size_t n = ggml_nbytes(t), cut = random_below(n + 1);
            const size_t parts[][2] = {{0, n}, {0, 1}, {n - 1, 1}, {n / 2, n - n / 2}, {cut, n - cut}, {0, cut}, {0, 0}, {n, 0}};
            for (size_t k = 0; k < sizeof parts / sizeof *parts; k++) {
                for (int direct = 0; direct < 2; direct++) {
                    step_set(&box, t, parts[k][0], parts[k][1], direct);
                    step_get(&box, t, parts[k][0], parts[k][1], direct);
                    step_memset(&box, t, parts[k][0], parts[k][1], direct);
                }
            }
#ifdef PEER_2D
            for (int direct = 0; direct < 2; direct++) {
                for (int set = 0; set < 2; set++) {
                    step_2d(&box, t, 0, n, 1, 0, 0, set, direct);
                    step_2d(&box, t, 0, n, 1, SIZE_MAX, SIZE_MAX, set, direct);
                    step_2d(&box, t, n - 1, 1, 1, n, n, set, direct);
                    step_2d(&box, t, 0, 1, n, 1, 3, set, direct);
                    step_2d(&box, t, 0, n / 3, n < 3 ? 0 : 3, n / 3, n, set, direct);
                    step_2d(&box, t, 0, 0, 5, n, n, set, direct);
                }
            }
#endif
        }
        step_clear(&box, 0, false);
        step_clear(&box, 0xff, true);
        step_clear(&box, (uint8_t)random_u64(), false);
        free_box(&box);

        /* Sizes around those at which regions change: cache line, page, huge page. */
        const size_t MB2 = 2 << 20, sizes[] = {1, 63, 64, 65, 4095, 4096, 4097, MB2 - 1, MB2, MB2 + 1, 1 + random_below(3 * MB2)};
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
            ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(places[i].type, sizes[k]);
            REQUIRE(buffer != NULL, "%s: no buffer of %zu bytes", NAMES[i], sizes[k]);
            uint8_t *base = ggml_backend_buffer_get_base(buffer), value = (uint8_t)random_u64();
            CHECK((uintptr_t)base % 64 == 0 && ggml_backend_buffer_get_size(buffer) == sizes[k], "%s: %zu bytes", NAMES[i], sizes[k]);
            ggml_backend_buffer_clear(buffer, value);
            size_t wrong = 0;
            for (size_t b = 0; b < sizes[k]; b++) {
                wrong += base[b] != value;
            }
            CHECK(wrong == 0, "%s: clear left %zu of %zu bytes", NAMES[i], wrong, sizes[k]);
            ggml_backend_buffer_free(buffer);
        }
    }
}

/* Every pair of {CPU, our three} as source and target. The host copies between host buffers by itself, so the slot is called too. */
static void test_copies(void) {
    struct box boxes[N_TYPES + 1];
    for (int i = 0; i < N_TYPES; i++) {
        boxes[i] = make_box(NAMES[i], places[i].type);
    }
    boxes[N_TYPES] = make_box("CPU", ggml_backend_cpu_buffer_type());
    for (int from = 0; from <= N_TYPES; from++) {
        for (int to = 0; to <= N_TYPES; to++) {
            for (int i = 0; i < N_TENSORS; i++) {
                step_copy(&boxes[from], &boxes[to], i, false);
                step_set(&boxes[from], boxes[from].tensors[i], 0, ggml_nbytes(boxes[from].tensors[i]), false);
                step_copy(&boxes[from], &boxes[to], i, to < N_TYPES);
            }
        }
    }
    /* What cannot be copied is said so, and the host copies another way. */
    for (int i = 0; i < N_TYPES; i++) {
        struct ggml_tensor nowhere = *boxes[i].tensors[0];
        nowhere.buffer = NULL;
        CHECK(!boxes[i].buffer->iface.cpy_tensor(boxes[i].buffer, &nowhere, boxes[i].tensors[0]), "%s: a source without a buffer", NAMES[i]);
        nowhere.buffer = boxes[i].buffer;
        nowhere.data = NULL;
        CHECK(!boxes[i].buffer->iface.cpy_tensor(boxes[i].buffer, &nowhere, boxes[i].tensors[0]), "%s: a source without data", NAMES[i]);
        SAME(&boxes[i]);
    }
    for (int i = 0; i <= N_TYPES; i++) {
        free_box(&boxes[i]);
    }
}

/* What lies outside is refused with one error line, and no byte changes. The host checks most of this itself, with an abort. */
static void test_limits(void) {
    for (int i = 0; i < N_TYPES; i++) {
        struct box box = make_box(NAMES[i], places[i].type), other = make_box(NAMES[i], places[i].type);
        ggml_backend_buffer_t buffer = box.buffer;
        const struct ggml_backend_buffer_i *slots = &buffer->iface;
        struct ggml_tensor *t = box.tensors[2];
        size_t n = ggml_nbytes(t);
        uint8_t data[4096], kept[4096];
        random_bytes(data, sizeof data);
        memcpy(kept, data, sizeof data);
        const size_t outside[][2] = {{n, 1}, {0, n + 1}, {1, n}, {1, SIZE_MAX}, {SIZE_MAX, 1}, {SIZE_MAX, SIZE_MAX}, {(size_t)1 << 63, 1}};
        for (size_t k = 0; k < sizeof outside / sizeof *outside; k++) {
            size_t offset = outside[k][0], size = outside[k][1];
            REFUSED(slots->set_tensor(buffer, t, data, offset, size), NAMES[i]);
            REFUSED(slots->get_tensor(buffer, t, data, offset, size), NAMES[i]);
            REFUSED(slots->memset_tensor(buffer, t, 1, offset, size), NAMES[i]);
        }
        REFUSED(slots->set_tensor(buffer, t, NULL, 0, 1), "NULL");
        REFUSED(slots->get_tensor(buffer, t, NULL, 0, 1), "NULL");
#ifdef PEER_2D
        const size_t outside_2d[][4] = {/* offset, size, count, stride */
                                        {0, 1, 2, n}, {0, 1, n + 1, 1}, {n, 1, 1, 0}, {0, 1, SIZE_MAX, SIZE_MAX}, {1, 1, 2, SIZE_MAX},
                                        {0, 2, SIZE_MAX, 1}, {SIZE_MAX, 1, 2, 1}, {0, SIZE_MAX, 2, 1}};
        for (size_t k = 0; k < sizeof outside_2d / sizeof *outside_2d; k++) {
            const size_t *o = outside_2d[k];
            REFUSED(slots->set_tensor_2d(buffer, t, data, o[0], o[1], o[2], o[3], 1), NAMES[i]);
            REFUSED(slots->get_tensor_2d(buffer, t, data, o[0], o[1], o[2], o[3], 1), NAMES[i]);
        }
        REFUSED(slots->set_tensor_2d(buffer, t, NULL, 0, 1, 2, 1, 1), "NULL");
        REFUSED(slots->get_tensor_2d(buffer, t, NULL, 0, 1, 2, 1, 1), "NULL");
#endif
        /* Tensors whose data is not in this buffer, or only in part. */
        uint8_t *strangers[] = {box.base - 1, box.base + box.size - n + 1, box.base + box.size, other.base + 64, NULL, (uint8_t *)(SIZE_MAX - n)};
        for (size_t k = 0; k < sizeof strangers / sizeof *strangers; k++) {
            struct ggml_tensor stranger = *t;
            stranger.data = strangers[k];
            REFUSED(slots->set_tensor(buffer, &stranger, data, 0, n), NAMES[i]);
            REFUSED(slots->get_tensor(buffer, &stranger, data, 0, n), NAMES[i]);
            REFUSED(slots->memset_tensor(buffer, &stranger, 1, 0, n), NAMES[i]);
            bool copied = true;
            REFUSED(copied = slots->cpy_tensor(buffer, t, &stranger), NAMES[i]);
            CHECK(!copied, "%s: a refused copy says that it was made", NAMES[i]);
        }
        bool copied = true; /* from a tensor that is larger than its target */
        REFUSED(copied = slots->cpy_tensor(buffer, box.tensors[3], box.tensors[4]), NAMES[i]);
        CHECK(!copied, "%s: a refused copy says that it was made", NAMES[i]);
        /* No bytes are no offence, wherever they are. */
        unsigned long quiet = log_errors;
        slots->set_tensor(buffer, t, NULL, 0, 0);
        slots->get_tensor(buffer, t, NULL, n, 0);
        slots->memset_tensor(buffer, t, 1, n, 0);
        struct ggml_tensor *none = ggml_new_tensor_1d(box.context, GGML_TYPE_F32, 0);
        CHECK(ggml_backend_tensor_alloc(buffer, none, box.base + box.size) == GGML_STATUS_SUCCESS, "%s: a tensor of no bytes", NAMES[i]);
        slots->set_tensor(buffer, none, data, 0, 0);
        slots->cpy_tensor(buffer, none, none);
        CHECK(log_errors == quiet, "%s: no bytes, and yet \"%s\"", NAMES[i], last_error);
        CHECK(memcmp(data, kept, sizeof data) == 0, "%s: a refused get wrote to its target", NAMES[i]);
        SAME(&box);
        free_box(&box);
        free_box(&other);

        const size_t huge[] = {SIZE_MAX, SIZE_MAX - 63, (size_t)1 << 63, (size_t)1 << 62, (size_t)1 << 48};
        for (size_t k = 0; k < sizeof huge / sizeof *huge; k++) {
            ggml_backend_buffer_t none_such = buffer;
            REFUSED(none_such = ggml_backend_buft_alloc_buffer(places[i].type, huge[k]), "");
            CHECK(none_such == NULL, "%s: a buffer of %zu bytes", NAMES[i], huge[k]);
        }

        /* Size 0: the host makes its own dummy, so the slot is called directly. */
        ggml_backend_buffer_t empty = places[i].type->iface.alloc_buffer(places[i].type, 0);
        REQUIRE(empty != NULL, "%s: no empty buffer", NAMES[i]);
        CHECK(ggml_backend_buffer_get_size(empty) == 0 && empty->iface.get_base(empty) != NULL, "%s: an empty buffer", NAMES[i]);
        quiet = log_errors;
        empty->iface.clear(empty, 7);
        CHECK(log_errors == quiet, "%s: clearing nothing", NAMES[i]);
        ggml_backend_buffer_free(empty);
        ggml_backend_buffer_free(ggml_backend_buft_alloc_buffer(places[i].type, 0));
    }
}

/* Zero copy over a file that the host has mapped, from a place that is aligned to nothing. */
static void test_borrowed(const char *path) {
    int file = open(path, O_RDWR);
    struct stat status;
    REQUIRE(file >= 0 && fstat(file, &status) == 0, "%s", path);
    size_t total = (size_t)status.st_size, skip = 4096 + 1 + 2 * random_below(2000), size = total - skip - random_below(5000);
    uint8_t *content = malloc(total);
    REQUIRE(read(file, content, total) == (ssize_t)total, "%s", path);
    const int modes[][2] = {{PROT_READ, MAP_SHARED}, {PROT_READ, MAP_PRIVATE}, {PROT_READ | PROT_WRITE, MAP_PRIVATE}};
    for (size_t m = 0; m < sizeof modes / sizeof *modes; m++) {
        bool writable = modes[m][0] & PROT_WRITE;
        uint8_t *map = mmap(NULL, total, modes[m][0], modes[m][1], file, 0), *base = map + skip;
        REQUIRE(map != MAP_FAILED, "mmap");
        struct box box = {.name = "borrowed", .base = base, .size = size, .shadow = malloc(size)};
        memcpy(box.shadow, content + skip, size);
        box.buffer = ggml_backend_dev_buffer_from_host_ptr(places[0].device, base, size, size / 2);
        REQUIRE(box.buffer != NULL, "no buffer: %s", last_error);
        CHECK(ggml_backend_buffer_get_base(box.buffer) == base && ggml_backend_buffer_get_size(box.buffer) == size, "moved or resized");
        CHECK(ggml_backend_buffer_is_host(box.buffer) && ggml_backend_buffer_get_type(box.buffer) == places[0].type, "type");
        box.context = ggml_init((struct ggml_init_params){.mem_size = 16 * ggml_tensor_overhead(), .no_alloc = true});
        struct ggml_tensor *t = ggml_new_tensor_2d(box.context, GGML_TYPE_Q8_0, 4096, 3);
        size_t n = ggml_nbytes(t), at = random_below(size - n);
        CHECK(ggml_backend_tensor_alloc(box.buffer, t, base + at) == GGML_STATUS_SUCCESS, "a tensor at an odd place");
        step_get(&box, t, 0, n, false);
        step_get(&box, t, n / 3, n / 2, true);

        struct ggml_tensor *copy = ggml_new_tensor_2d(box.context, GGML_TYPE_Q8_0, 4096, 3);
        for (int i = 0; i < N_TYPES; i++) { /* a read-only mapping is a source like any other */
            ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(places[i].type, n);
            struct ggml_tensor target = *copy;
            ggml_backend_tensor_alloc(buffer, &target, ggml_backend_buffer_get_base(buffer));
            CHECK(buffer->iface.cpy_tensor(buffer, t, &target), "not copied to %s", NAMES[i]);
            CHECK(memcmp(target.data, box.shadow + at, n) == 0, "copied wrongly to %s", NAMES[i]);
            ggml_backend_buffer_free(buffer);
        }
        if (writable) {
            step_set(&box, t, 5, n - 5, false);
            step_memset(&box, t, 0, n, false);
            step_clear(&box, 0x5a, false);
        } else {
            ggml_backend_buffer_t cpu = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), n);
            ggml_backend_tensor_alloc(cpu, copy, ggml_backend_buffer_get_base(cpu));
            ggml_backend_buffer_clear(cpu, 1);
            uint8_t byte = (uint8_t)~box.shadow[at];
            REFUSED(ggml_backend_tensor_set(t, &byte, 0, 1), "read-only");
            REFUSED(ggml_backend_tensor_memset(t, byte, 0, 1), "read-only");
            REFUSED(ggml_backend_buffer_clear(box.buffer, byte), "read-only");
            REFUSED(ggml_backend_tensor_copy(copy, t), "read-only");
            bool copied = true;
            REFUSED(copied = box.buffer->iface.cpy_tensor(box.buffer, copy, t), "read-only");
            CHECK(!copied, "a refused copy says that it was made");
#ifdef PEER_2D
            REFUSED(ggml_backend_tensor_set_2d(t, copy->data, 0, 1, 2, 1, 1), "read-only");
            step_2d(&box, t, 3, 100, 9, 301, 128, false, true);
#endif
            ggml_backend_buffer_free(cpu);
        }
        free_box(&box);
        CHECK(munmap(map, total) == 0, "munmap");
    }
    uint8_t *again = malloc(total);
    CHECK(pread(file, again, total, 0) == (ssize_t)total && memcmp(content, again, total) == 0, "the file has changed");

    ggml_backend_dev_t device = places[0].device;
    ggml_backend_buffer_t none = NULL;
    REFUSED(none = device->iface.buffer_from_host_ptr(device, NULL, 1, 1), "NULL");
    CHECK(none == NULL, "a buffer at NULL");
    REFUSED(none = device->iface.buffer_from_host_ptr(device, content, SIZE_MAX, 1), "wrap");
    CHECK(none == NULL, "a buffer around the end of the address space");
    for (int i = 1; i < N_TYPES; i++) {
        REFUSED(none = places[i].device->iface.buffer_from_host_ptr(places[i].device, content, total, total), "CPU_MMAP");
        CHECK(none == NULL, "%s over somebody else's memory", NAMES[i]);
    }
    ggml_backend_buffer_t empty = device->iface.buffer_from_host_ptr(device, NULL, 0, 0);
    CHECK(empty != NULL && ggml_backend_buffer_get_size(empty) == 0, "an empty mapping");
    ggml_backend_buffer_free(empty);
    free(again);
    free(content);
    close(file);
}

/* Ten thousand random steps, every byte of every buffer compared after each. */
static void test_random(void) {
    struct box boxes[N_TYPES + 1];
    for (int i = 0; i < N_TYPES; i++) {
        boxes[i] = make_box(NAMES[i], places[i].type);
    }
    boxes[N_TYPES] = make_box("CPU", ggml_backend_cpu_buffer_type());
    for (int step = 0; step < 10000; step++) {
        struct box *box = &boxes[random_below(N_TYPES + 1)], *ours = &boxes[random_below(N_TYPES)];
        struct ggml_tensor *t = box->tensors[random_below(N_TENSORS)];
        size_t n = ggml_nbytes(t), offset = random_below(n + 1), size = random_below(n - offset + 1);
        bool direct = random_below(2);
        switch (random_below(12)) {
        case 0: case 1: step_set(box, t, offset, size, direct); break;
        case 2: case 3: step_get(box, t, offset, size, direct); break;
        case 4: step_memset(box, t, offset, size, direct); break;
        case 5: if (random_below(20) == 0) { step_clear(box, (uint8_t)random_u64(), direct); } break;
        case 6: case 7: case 8: step_copy(box, ours, (int)random_below(N_TENSORS), direct); break;
        case 9: step_copy(ours, box, (int)random_below(N_TENSORS), false); break;
#ifdef PEER_2D
        case 10: random_2d(box, true, direct && box != &boxes[N_TYPES]); break;
        default: random_2d(box, false, direct && box != &boxes[N_TYPES]); break;
#else
        default: step_get(box, t, offset, size, direct); break;
#endif
        }
        for (int i = 0; i <= N_TYPES; i++) {
            SAME(&boxes[i]);
        }
    }
    for (int i = 0; i <= N_TYPES; i++) {
        free_box(&boxes[i]);
    }
}

int main(int argc, char **argv) {
    REQUIRE(argc >= 4, "usage: vtable_peer LIBBERTH SEED TEST [FILE]");
    random_state = strtoull(argv[2], NULL, 10);
    ggml_log_set(on_log, NULL);
    ggml_backend_reg_t reg = load_berth(argv[1]);
    for (int i = 0; i < N_TYPES; i++) {
        places[i].device = ggml_backend_reg_dev_get(reg, (size_t)i);
        places[i].type = ggml_backend_dev_buffer_type(places[i].device);
    }
    const char *test = argv[3];
    unsigned long before = log_errors;
    if (strcmp(test, "types") == 0) {
        test_types(reg);
    } else if (strcmp(test, "bytes") == 0) {
        test_bytes();
        CHECK(log_errors == before, "an error line: %s", last_error);
    } else if (strcmp(test, "copies") == 0) {
        test_copies();
        CHECK(log_errors == before, "an error line: %s", last_error);
    } else if (strcmp(test, "limits") == 0) {
        test_limits();
    } else if (strcmp(test, "borrowed") == 0 && argc > 4) {
        test_borrowed(argv[4]);
    } else if (strcmp(test, "random") == 0) {
        test_random();
        CHECK(log_errors == before, "an error line: %s", last_error);
    } else {
        REQUIRE(false, "no test %s", test);
    }
    return finish();
}
