/*
 * mapped: a tensor that stays in the file it was mapped from. Nothing is copied, and no anonymous memory is used.
 *
 * What llama.cpp's loader does with CPU_MMAP, in one page: map the file, lay a buffer over the range, put tensors at their offsets.
 *
 *     make && ./mapped FILE
 */
#include <berth.h>
#include <fcntl.h>
#include <ggml-backend.h>
#include <ggml.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int main(int argc, char **argv) {
    int file = argc == 2 ? open(argv[1], O_RDONLY) : -1;
    struct stat status;
    if (file < 0 || fstat(file, &status) != 0 || status.st_size < 2) {
        fprintf(stderr, "usage: mapped FILE\n");
        return 1;
    }
    size_t size = (size_t)status.st_size;
    uint8_t *map = mmap(NULL, size, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (map == MAP_FAILED) {
        perror("mmap");
        return 1;
    }

    ggml_backend_buffer_type_t type = berth_buft_cpu_mmap();
    if (type == NULL) {
        fprintf(stderr, "no Berth: %s\n", berth_last_error());
        return 1;
    }
    /* The range may begin anywhere: here, at the second byte. */
    ggml_backend_buffer_t buffer = ggml_backend_dev_buffer_from_host_ptr(ggml_backend_buft_get_device(type), map + 1, size - 1, size - 1);
    struct ggml_init_params params = {.mem_size = ggml_tensor_overhead(), .mem_buffer = NULL, .no_alloc = true};
    struct ggml_context *context = ggml_init(params);
    struct ggml_tensor *tensor = ggml_new_tensor_1d(context, GGML_TYPE_I8, (int64_t)size - 1);
    ggml_backend_tensor_alloc(buffer, tensor, map + 1);

    uint8_t last = 0;
    ggml_backend_tensor_get(tensor, &last, size - 2, 1);
    int in_place = tensor->data == map + 1 && last == map[size - 1];
    printf("%zu bytes of %s, %s\n", size - 1, argv[1], in_place ? "in place" : "COPIED");

    /* The buffer goes first: it points into the mapping. */
    ggml_backend_buffer_free(buffer);
    ggml_free(context);
    munmap(map, size);
    return in_place ? 0 : 1;
}
