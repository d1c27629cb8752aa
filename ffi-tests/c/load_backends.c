// To be preloaded into a program of a `GGML_BACKEND_DL` build that forgets to load the backends: does it before `main`.
// Linked with the host's libggml, so that ggml's own constructors have run by then.

void ggml_backend_load_all(void);

__attribute__((constructor)) static void load_backends(void) {
    ggml_backend_load_all();
}
