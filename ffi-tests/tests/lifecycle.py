"""Berth in a Python process, where every library is loaded RTLD_LOCAL and nothing is in the global scope.

    lifecycle.py LIBBERTH one GGML_BASE GGML
    lifecycle.py LIBBERTH two GGML_BASE GGML GGML_BASE GGML

ggml is used through ctypes alone. Prints "ok" or fails with a traceback.
"""

import ctypes as c
import json
import os
import sys

SIZE = 100_003
TYPES = ["CPU_MMAP", "CUDA_Host", "ARENA"]
GGML_TYPE_I8 = 24


class InitParams(c.Structure):
    _fields_ = [("mem_size", c.c_size_t), ("mem_buffer", c.c_void_p), ("no_alloc", c.c_bool)]


def function(library, name, result, *arguments):
    f = getattr(library, name)
    f.restype, f.argtypes = result, arguments
    return f


class Ggml:
    """One ggml of this process, and Berth as it sees it."""

    def __init__(self, base_path, ggml_path):
        self.path = base_path
        self.base = c.CDLL(base_path, mode=os.RTLD_LOCAL | os.RTLD_NOW)
        self.ggml = c.CDLL(ggml_path, mode=os.RTLD_LOCAL | os.RTLD_NOW)
        p, n, s = c.c_void_p, c.c_size_t, c.c_char_p
        b, g = self.base, self.ggml
        self.version = function(b, "ggml_version", s)
        self.load = function(g, "ggml_backend_load", p, s)
        self.unload = function(g, "ggml_backend_unload", None, p)
        self.by_name = function(g, "ggml_backend_reg_by_name", p, s)
        self.dev_count = function(b, "ggml_backend_reg_dev_count", n, p)
        self.dev_get = function(b, "ggml_backend_reg_dev_get", p, p, n)
        self.dev_buft = function(b, "ggml_backend_dev_buffer_type", p, p)
        self.buft_name = function(b, "ggml_backend_buft_name", s, p)
        self.alloc = function(b, "ggml_backend_buft_alloc_buffer", p, p, n)
        self.free = function(b, "ggml_backend_buffer_free", None, p)
        self.get_base = function(b, "ggml_backend_buffer_get_base", p, p)
        self.clear = function(b, "ggml_backend_buffer_clear", None, p, c.c_uint8)
        self.tensor_alloc = function(b, "ggml_backend_tensor_alloc", c.c_int, p, p, p)
        self.set = function(b, "ggml_backend_tensor_set", None, p, s, n, n)
        self.get = function(b, "ggml_backend_tensor_get", None, p, p, n, n)
        self.memset = function(b, "ggml_backend_tensor_memset", None, p, c.c_uint8, n, n)
        self.context = function(b, "ggml_init", p, InitParams)(InitParams(1 << 16, None, True))
        self.new_tensor = function(b, "ggml_new_tensor_1d", p, p, c.c_int, c.c_int64)

    def load_berth(self):
        reg = self.load(LIBBERTH)
        assert reg, "not loaded"
        return reg

    def unload_berth(self, reg):
        # Old hosts list a registry once more for every load.
        while self.by_name(b"BERTH"):
            self.unload(reg)

    def blocks(self, reg):
        return [Block(self, self.dev_buft(self.dev_get(reg, i))) for i in range(len(TYPES))]


class Block:
    """A buffer with one tensor of random bytes."""

    def __init__(self, ggml, buft):
        self.ggml, self.bytes = ggml, bytearray(os.urandom(SIZE))
        self.buffer = ggml.alloc(buft, SIZE)
        assert self.buffer
        self.tensor = ggml.new_tensor(ggml.context, GGML_TYPE_I8, SIZE)
        assert ggml.tensor_alloc(self.buffer, self.tensor, ggml.get_base(self.buffer)) == 0
        ggml.set(self.tensor, bytes(self.bytes), 0, SIZE)

    def use(self):
        assert self.read() == self.bytes
        self.ggml.memset(self.tensor, 7, 1000, 50_000)
        self.bytes[1000:51_000] = b"\x07" * 50_000
        assert self.read() == self.bytes

    def read(self):
        target = c.create_string_buffer(SIZE)
        self.ggml.get(self.tensor, target, 0, SIZE)
        return target.raw

    def free(self):
        self.ggml.free(self.buffer)


def load_unload_and_outlive(ggml):
    reg = ggml.load_berth()
    for _ in range(10):
        assert ggml.load_berth() == reg
    assert [ggml.buft_name(ggml.dev_buft(ggml.dev_get(reg, i))).decode() for i in range(ggml.dev_count(reg))] == TYPES
    for _ in range(10):
        ggml.unload_berth(reg)
        assert ggml.load_berth() == reg
    blocks = ggml.blocks(reg)
    ggml.unload_berth(reg)
    for block in blocks:
        block.use()
        block.free()
    assert ggml.load_berth() == reg
    return reg


def berth_api():
    """Berth opened a second time, as a C library of the script's own."""
    berth = c.CDLL(os.fsdecode(LIBBERTH), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    return (
        function(berth, "berth_reg", c.c_void_p),
        function(berth, "berth_last_error", c.c_char_p),
        function(berth, "berth_report_json", c.c_int, c.POINTER(c.c_void_p)),
        function(berth, "berth_string_free", None, c.c_void_p),
    )


def report():
    _, _, report_json, string_free = berth_api()
    text = c.c_void_p()
    assert report_json(c.byref(text)) == 0
    parsed = json.loads(c.string_at(text.value))
    string_free(text)
    return parsed


def one(base, ggml_path):
    ggml = Ggml(base, ggml_path)
    reg = load_unload_and_outlive(ggml)
    # The caller is libffi here, which knows no ggml: the only one of the process is meant.
    berth_reg, _, _, _ = berth_api()
    assert berth_reg() == reg
    assert len(report()["hosts"]) == 1
    for block in ggml.blocks(reg):
        block.use()  # and left alive at the end of the process


def two(*paths):
    hosts = [Ggml(*paths[:2]), Ggml(*paths[2:])]
    assert hosts[0].version() != hosts[1].version(), "one ggml came twice"
    regs = [load_unload_and_outlive(h) for h in hosts]
    assert regs[0] != regs[1], "two hosts share a registry"
    assert [h.load_berth() for h in hosts] == regs
    mixed = [b for pair in zip(*(h.blocks(r) for h, r in zip(hosts, regs))) for b in pair]
    for block in mixed:
        block.use()
    for block in reversed(mixed):
        block.use()
        block.free()
    found = [(h["ggml_version"], os.path.realpath(h["file"])) for h in report()["hosts"]]
    assert found == [(h.version().decode(), os.path.realpath(h.path)) for h in hosts], found
    # Asked by a caller that uses neither, Berth does not guess.
    berth_reg, last_error, _, _ = berth_api()
    assert berth_reg() is None
    message = last_error().decode()
    assert "several ggml" in message and all(os.path.basename(os.path.realpath(h.path)) in message for h in hosts), message


LIBBERTH = os.fsencode(sys.argv[1])
{"one": one, "two": two}[sys.argv[2]](*sys.argv[3:])
print("ok")
