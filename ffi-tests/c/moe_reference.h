/*
 * The experts of a block in f64, from the same bytes that Berth gets, with what its roundings may do to every value.
 *
 * Berth rounds tokens and intermediate values to 8 bits, a scale per 32 or 256 values: half a step is amax / 254. Two measures come of it.
 * `off` is the worst case: every rounding has the worst sign; no value may differ by more. `noise` is the variance if roundings are
 * independent, half^2 / 3 each. The values of one token share its roundings, and weights whose mean is not zero let all of them add up: the mean
 * square error of a token is spread like chi-square with one degree of freedom at worst, of `tokens` tokens with as many. What one comparison may
 * show is therefore FACTOR * (1 + sqrt(2 ln(1/P) / tokens))^2 times the noise, the bound of Laurent and Massart (2000, lemma 1) for chance P; what
 * all comparisons of a group show in the mean, FACTOR times. Seen: 0.9.
 */
#ifndef MOE_REFERENCE_H
#define MOE_REFERENCE_H

#include <berth.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moe_formats.h"

static const double FACTOR = 4, LN_CHANCE = 20;
/* f32 sums of up to some thousand terms, relative to the sum of their magnitudes: at worst, and usually. */
static const double SUM = 2e-5, USUAL_SUM = 1e-6;

/* A vector of values with their errors. */
struct vector {
    double *value, *off, *noise;
};

static double squared(double x) {
    return x * x;
}

struct projection {
    const struct moe_format *format;
    size_t k, rows, experts;
    const float *values; /* decoded, [k, rows, experts] */
    const float *scale, *bias;
};

static void *must(void *memory) {
    if (memory == NULL) {
        fprintf(stderr, "no memory\n");
        exit(1);
    }
    return memory;
}

static struct vector vector_new(size_t n) {
    return (struct vector){must(calloc(n + 1, sizeof(double))), must(calloc(n + 1, sizeof(double))), must(calloc(n + 1, sizeof(double)))};
}

static void vector_free(struct vector v) {
    free(v.value);
    free(v.off);
    free(v.noise);
}

/* The error of n values grows by their rounding for a product with weights of this format. */
static void round_values(const struct moe_format *format, struct vector x, size_t n) {
    for (size_t first = 0; format->rounded > 0 && first < n; first += format->rounded) {
        const size_t end = first + format->rounded < n ? first + format->rounded : n;
        double most = 0, usual = 0;
        for (size_t i = first; i < end; i++) {
            most = fmax(most, fabs(x.value[i]) + x.off[i]);
            usual = fmax(usual, fabs(x.value[i]) + sqrt(x.noise[i]));
        }
        for (size_t i = first; i < end; i++) {
            x.off[i] += most / 127 * 0.501;
            x.noise[i] += squared(usual / 127 * 0.501) / 3;
        }
    }
}

/* scale * before * (row . x) + bias for all rows of an expert. */
static void product(const struct projection *p, size_t expert, struct vector x, double before, struct vector out) {
    const double scale = (p->scale != NULL ? (double)p->scale[expert] : 1.0) * before;
    for (size_t r = 0; r < p->rows; r++) {
        const float *w = p->values + (expert * p->rows + r) * p->k;
        double sum = 0, off = 0, noise = 0, all = 0;
        for (size_t i = 0; i < p->k; i++) {
            sum += (double)w[i] * x.value[i];
            off += fabs((double)w[i]) * x.off[i];
            noise += squared((double)w[i]) * x.noise[i];
            all += fabs((double)w[i] * x.value[i]);
        }
        const double bias = p->bias != NULL ? (double)p->bias[expert * p->rows + r] : 0;
        out.value[r] = sum * scale + bias;
        out.off[r] = (off + SUM * all) * fabs(scale) + 1e-6 * fabs(bias);
        out.noise[r] = (noise + squared(USUAL_SUM * all)) * squared(scale) + squared(1e-7 * bias);
    }
}

static double sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

static double clamped(double x, double limit) {
    return fmax(fmin(x, limit), -limit);
}

static int is_gated(uint32_t activation) {
    return activation < BERTH_ACTIVATION_SILU;
}

/* out[i] = act(g[i], u[i]). The slope of every function of g is below 1.13. */
static void activate(uint32_t activation, double alpha, double limit, struct vector gate, struct vector up, size_t i, struct vector out) {
    const double g = gate.value[i], u = up.value[i], dg = gate.off[i], du = up.off[i];
    double a = 0, b = u;
    switch (activation) {
    case BERTH_ACTIVATION_SWIGLU: a = g * sigmoid(g); break;
    case BERTH_ACTIVATION_SWIGLU_OAI: a = fmin(g, limit) * sigmoid(alpha * fmin(g, limit)); b = clamped(u, limit) + 1; break;
    case BERTH_ACTIVATION_SWIGLU_CLAMP: a = fmin(g, limit) * sigmoid(fmin(g, limit)); b = clamped(u, limit); break;
    case BERTH_ACTIVATION_GEGLU: a = 0.5 * g * (1 + tanh(0.79788456080286535588 * (g + 0.044715 * g * g * g))); break;
    case BERTH_ACTIVATION_GEGLU_ERF: a = 0.5 * g * erfc(-g * 0.70710678118654752440); break;
    case BERTH_ACTIVATION_GEGLU_QUICK: a = g * sigmoid(1.702 * g); break;
    case BERTH_ACTIVATION_REGLU: a = fmax(g, 0); break;
    case BERTH_ACTIVATION_SILU: a = u * sigmoid(u); break;
    case BERTH_ACTIVATION_GELU: a = 0.5 * u * (1 + tanh(0.79788456080286535588 * (u + 0.044715 * u * u * u))); break;
    case BERTH_ACTIVATION_RELU: a = fmax(u, 0); break;
    default: a = fmax(u, 0) * fmax(u, 0); break;
    }
    if (is_gated(activation)) {
        out.value[i] = a * b;
        out.off[i] = 1.13 * dg * (fabs(b) + du) + fabs(a) * du + 4e-6 * fabs(a * b) + 1e-12;
        out.noise[i] = squared(1.13) * gate.noise[i] * (squared(b) + up.noise[i]) + squared(a) * up.noise[i] + squared(1e-6 * a * b);
    } else {
        const int is_square = activation == BERTH_ACTIVATION_RELU_SQR;
        out.value[i] = a;
        out.off[i] = (is_square ? 2 * fabs(u) + du : 1.13) * du + 4e-6 * fabs(a) + 1e-12;
        out.noise[i] = (is_square ? 4 * squared(u) + up.noise[i] : squared(1.13)) * up.noise[i] + squared(1e-6 * a);
    }
}

/* The mean square errors of comparisons that have a name in common, as shares of their noise. */
struct group {
    const char *what;
    double sum;
    size_t comparisons;
};

/* Compares the n values of so many tokens; 0 if each is within its bound and their mean square error is within its own. */
static int compare(const char *what, const float *got, size_t n, size_t tokens, struct vector want, struct group *group) {
    double error = 0, noise = 0;
    for (size_t i = 0; i < n; i++) {
        const double e = fabs((double)got[i] - want.value[i]);
        if (!(e <= want.off[i])) {
            fprintf(stderr, "%s: value %zu is %g, not %g within %g\n", what, i, (double)got[i], want.value[i], want.off[i]);
            return 1;
        }
        error += e * e;
        noise += want.noise[i];
    }
    const double share = error > 0 ? error / noise : 0;
    group->sum += share;
    group->comparisons++;
    if (share > FACTOR * squared(1 + sqrt(2 * LN_CHANCE / (double)tokens))) {
        fprintf(stderr, "%s: the mean square error is %g times that of independent roundings\n", what, share);
        return 1;
    }
    return 0;
}

/* The mean of a group that ends here; 0 if it is within its bound. Keeps the largest. */
static int end_group(struct group *group, const char *next, double *worst) {
    const double mean = group->comparisons > 0 ? group->sum / (double)group->comparisons : 0;
    const char *what = group->what;
    *group = (struct group){.what = next};
    *worst = fmax(*worst, mean);
    if (mean > FACTOR) {
        fprintf(stderr, "%s: the mean square errors are %g times those of independent roundings\n", what, mean);
        return 1;
    }
    return 0;
}

#endif
