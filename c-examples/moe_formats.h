/*
 * The block formats that Berth multiplies, for programs that need weights to try it with: names, sizes, random blocks, and their values.
 *
 * Blocks have random bits and scales of moderate size. Values come out bit for bit as ggml's to_float gives them: the order of the few
 * operations matters, and the compiler must not fuse them (-std=c11 does not).
 */
#ifndef MOE_FORMATS_H
#define MOE_FORMATS_H

#include <ctype.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct moe_format {
    const char *name;
    uint32_t type;    /* enum ggml_type */
    uint32_t weights; /* in a block */
    uint32_t bytes;   /* of a block */
    uint32_t rounded; /* activations that Berth rounds to 8 bits with one scale; 0 if it keeps floats */
};

enum { MOE_FORMATS = 16, MOE_MAX_WEIGHTS = 256, MOE_MAX_BYTES = 210 };

static const struct moe_format moe_formats[MOE_FORMATS] = {
    {"f32", 0, 1, 4, 0},          {"f16", 1, 1, 2, 0},          {"q4_0", 2, 32, 18, 32},      {"q4_1", 3, 32, 20, 32},
    {"q5_0", 6, 32, 22, 32},      {"q5_1", 7, 32, 24, 32},      {"q8_0", 8, 32, 34, 32},      {"q2_K", 10, 256, 84, 256},
    {"q3_K", 11, 256, 110, 256},  {"q4_K", 12, 256, 144, 256},  {"q5_K", 13, 256, 176, 256},  {"q6_K", 14, 256, 210, 256},
    {"iq4_nl", 20, 32, 18, 32},   {"iq4_xs", 23, 256, 136, 32}, {"bf16", 30, 1, 2, 0},        {"mxfp4", 39, 32, 17, 32},
};

/* By name, in any case. NULL if there is none. */
static inline const struct moe_format *moe_format_named(const char *name) {
    for (size_t i = 0; i < MOE_FORMATS; i++) {
        size_t c = 0;
        while (name[c] != 0 && tolower((unsigned char)name[c]) == tolower((unsigned char)moe_formats[i].name[c])) {
            c++;
        }
        if (name[c] == 0 && moe_formats[i].name[c] == 0) {
            return &moe_formats[i];
        }
    }
    return NULL;
}

/* Bytes of a row of k weights; 0 if these are not whole blocks. */
static inline size_t moe_row_bytes(const struct moe_format *format, size_t k) {
    return k % format->weights == 0 ? k / format->weights * format->bytes : 0;
}

/* xorshift64*; the state must not be 0. */
static inline uint64_t moe_random(uint64_t *state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1du >> 16;
}

/* In -1 .. 1. */
static inline float moe_random_signed(uint64_t *state) {
    return (float)(moe_random(state) & 0xffffff) / 8388608.0f - 1.0f;
}

/* A half of either sign, of magnitude 2^-8 to 2^-4. */
static inline void moe_random_half(uint64_t *state, uint8_t *at) {
    const uint64_t r = moe_random(state);
    const uint16_t bits = (uint16_t)((7 + (r & 3)) << 10 | (r >> 2 & 0x3ff) | (r >> 12 & 1) << 15);
    memcpy(at, &bits, sizeof(bits));
}

static inline void moe_random_block(const struct moe_format *format, uint64_t *state, uint8_t *block) {
    for (size_t i = 0; i < format->bytes; i++) {
        block[i] = (uint8_t)moe_random(state);
    }
    const float value = moe_random_signed(state);
    switch (format->type) {
    case 0:
        memcpy(block, &value, 4);
        break;
    case 30:
        memcpy(block, (const uint8_t *)&value + 2, 2);
        break;
    case 3: case 7: case 12: case 13:
        moe_random_half(state, block + 2);
        moe_random_half(state, block);
        break;
    case 10:
        moe_random_half(state, block + 80);
        moe_random_half(state, block + 82);
        break;
    case 11: case 14:
        moe_random_half(state, block + format->bytes - 2);
        break;
    case 39:
        block[0] = (uint8_t)(118 + block[0] % 6);
        break;
    default:
        moe_random_half(state, block);
        break;
    }
}

static inline float moe_half(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, sizeof(bits));
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value;
    if (exponent == 31) {
        value = fraction == 0 ? INFINITY : NAN;
    } else {
        value = exponent == 0 ? ldexpf((float)fraction, -24) : ldexpf((float)(1024 + fraction), exponent - 25);
    }
    return bits >> 15 ? -value : value;
}

/* The values of the 16 codes of IQ4_NL and IQ4_XS, and twice those of MXFP4. */
static const int8_t moe_iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t moe_fp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* Scale or min (second) of sub-block i of 8 in Q4_K and Q5_K: six bits each. */
static inline int moe_k_scale(const uint8_t *packed, int i, int second) {
    if (i < 4) {
        return packed[i + 4 * second] & 63;
    }
    const int low = second ? packed[i + 4] >> 4 : packed[i + 4] & 15;
    return low | packed[i - 4 + 4 * second] >> 6 << 4;
}

static inline void moe_decode_block(const struct moe_format *format, const uint8_t *block, float *out) {
    const float d = format->weights > 1 && format->type != 39 ? moe_half(block) : 0;
    switch (format->type) {
    case 0:
        memcpy(out, block, 4);
        return;
    case 1:
        out[0] = moe_half(block);
        return;
    case 30: {
        const uint32_t bits = (uint32_t)block[0] << 16 | (uint32_t)block[1] << 24;
        memcpy(out, &bits, 4);
        return;
    }
    case 8:
        for (int i = 0; i < 32; i++) {
            out[i] = (float)(int8_t)block[2 + i] * d;
        }
        return;
    case 2: case 3: case 6: case 7: case 20: case 39: {
        /* Nibbles at the end, the low ones first; in Q5 the fifth bits before them. */
        const uint8_t *qs = block + format->bytes - 16, *high = qs - 4;
        const float m = format->type == 3 || format->type == 7 ? moe_half(block + 2) : 0;
        for (int i = 0; i < 32; i++) {
            const int nibble = i < 16 ? qs[i] & 15 : qs[i - 16] >> 4;
            const int five = format->type == 6 || format->type == 7 ? nibble | (high[i / 8] >> i % 8 & 1) << 4 : nibble;
            switch (format->type) {
            case 2: out[i] = (float)(five - 8) * d; break;
            case 6: out[i] = (float)(five - 16) * d; break;
            case 20: out[i] = d * (float)moe_iq4_values[five]; break;
            case 39: out[i] = (float)moe_fp4_values[five] * ldexpf(1, block[0] - 128); break;
            default: out[i] = (float)five * d + m; break;
            }
        }
        return;
    }
    case 10: case 11: {
        /* Two bits a weight: four weights 32 apart share a byte. */
        const bool q3 = format->type == 11;
        const uint8_t *qs = block + (q3 ? 32 : 16), *scales = q3 ? block + 96 : block;
        const float super = moe_half(block + (q3 ? 108 : 80)), min = q3 ? 0 : moe_half(block + 82);
        for (int i = 0; i < 256; i++) {
            const int two = qs[32 * (i / 128) + i % 32] >> 2 * (i % 128 / 32) & 3, s = i / 16;
            if (q3) {
                const int low = s < 8 ? scales[s] & 15 : scales[s - 8] >> 4;
                const int scale = (low | (scales[8 + s % 4] >> 2 * (s / 4) & 3) << 4) - 32;
                out[i] = super * (float)scale * (float)((two | (block[i % 32] >> i / 32 & 1) << 2) - 4);
            } else {
                const float scaled = super * (float)(scales[s] & 15) * (float)two;
                out[i] = scaled - min * (float)(scales[s] >> 4);
            }
        }
        return;
    }
    case 12: case 13: {
        const uint8_t *high = block + 16, *qs = format->type == 13 ? high + 32 : high;
        const float min = moe_half(block + 2);
        for (int i = 0; i < 256; i++) {
            int q = qs[32 * (i / 64) + i % 32] >> 4 * (i % 64 / 32) & 15;
            if (format->type == 13) {
                q |= (high[i % 32] >> i / 32 & 1) << 4;
            }
            const float scaled = d * (float)moe_k_scale(block + 4, i / 32, 0) * (float)q;
            out[i] = scaled - min * (float)moe_k_scale(block + 4, i / 32, 1);
        }
        return;
    }
    case 14: {
        const float super = moe_half(block + 208);
        for (int i = 0; i < 256; i++) {
            const int half = i / 128, part = i % 128 / 32, l = i % 32;
            const int low = block[64 * half + 32 * (part % 2) + l] >> 4 * (part / 2) & 15;
            const int high = block[128 + 32 * half + l] >> 2 * part & 3;
            out[i] = super * (float)(int8_t)block[192 + i / 16] * (float)((low | high << 4) - 32);
        }
        return;
    }
    case 23:
        for (int i = 0; i < 256; i++) {
            const int s = i / 32, l = i % 32, byte = block[8 + 16 * s + l % 16];
            const int low = block[4 + s / 2] >> 4 * (s % 2) & 15, high = (block[2] | block[3] << 8) >> 2 * s & 3;
            out[i] = d * (float)((low | high << 4) - 32) * (float)moe_iq4_values[l < 16 ? byte & 15 : byte >> 4];
        }
        return;
    default:
        return;
    }
}

/* Consecutive blocks. */
static inline void moe_decode(const struct moe_format *format, const uint8_t *bytes, size_t weights, float *out) {
    for (size_t i = 0; i < weights; i += format->weights, bytes += format->bytes) {
        moe_decode_block(format, bytes, out + i);
    }
}

#endif
