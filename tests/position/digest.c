#include "digest.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "problem_text.h"
#include "qkv/position.h"
#include "rng.h"

enum { NAME = 64, ELEMENTS = 40000 };

static const int32_t types[4] = {QKV_F32, QKV_F64, QKV_F16, QKV_BF16};
static double memory[2][ELEMENTS]; /* two tensors of any type */

/* 64-bit FNV-1a over bytes, the least significant first whatever the host is. */
static uint64_t digest_of(const void *data, int32_t dtype, int64_t count) {
  uint64_t hash = UINT64_C(0xcbf29ce484222325);
  const size_t size = problem_dtype_of(dtype)->size;
  for (int64_t n = 0; n < count; n++) {
    const char *p = (const char *)data + (size_t)n * size;
    uint64_t bits = 0;
    uint32_t word;
    uint16_t half;
    if (size == 8) {
      memcpy(&bits, p, 8);
    } else if (size == 4) {
      memcpy(&word, p, 4);
      bits = word;
    } else {
      memcpy(&half, p, 2);
      bits = half;
    }
    for (size_t k = 0; k < size; k++) {
      hash = (hash ^ (bits >> (8 * k) & 0xff)) * UINT64_C(0x100000001b3);
    }
  }
  return hash;
}

static void fill(void *to, int32_t dtype, int64_t count, uint64_t seed) {
  const problem_dtype *d = problem_dtype_of(dtype);
  for (int64_t n = 0; n < count; n++) {
    d->store((char *)to + (size_t)n * d->size, rng_normal_at(seed, 9, (uint64_t)n));
  }
}

/* ---- Cases: each writes its name and digest, and answers whether there is such a one -------------------------------- */

static bool sinusoidal_case(int n, char *name, qkv_status *status, uint64_t *digest) {
  static const struct {
    int64_t d, start;
    double base, dropout;
  } at[] = {{64, 0, 0, 0},         {5, 1000000, 0, 0},    {129, -2147483647 - 1, 0, 0.1}, {64, 2147483600, 500000, 0},
            {1, 77, 0, 0.5},       {300, 4000, 1.5, 0},   {66, 123456789, 1e6, 0.25},     {2, -5, 0, 1}};
  enum { B = 2, N = 40, CASES = sizeof at / sizeof *at };
  const int type = n % 4, which = n / 4 % CASES, backward = n / 4 / CASES;
  qkv_sinusoidal s = qkv_sinusoidal_default();
  if (n < 0 || backward > 1) {
    return false;
  }
  snprintf(name, NAME, "sinusoidal %s %s %d", backward ? "backward" : "forward", problem_dtype_of(types[type])->name, which);
  fill(memory[0], types[type], B * N * at[which].d, (uint64_t)n);
  s.batch = B;
  s.seqlen = N;
  s.d_model = at[which].d;
  s.start = at[which].start;
  s.base = at[which].base;
  s.dropout = at[which].dropout;
  s.seed = 11;
  s.x = qkv_strided(memory[0], types[type], N * s.d_model, 0, s.d_model, 1);
  s.out = qkv_strided(memory[1], types[type], N * s.d_model, 0, s.d_model, 1);
  *status = backward ? qkv_sinusoidal_backward(NULL, &s) : qkv_sinusoidal_forward(NULL, &s);
  *digest = digest_of(memory[1], types[type], B * N * s.d_model);
  return true;
}

#define OF(...) {.size = sizeof(qkv_frequencies), __VA_ARGS__}
static const double factors[6] = {1, 1.25, 3, 10, 100, 0.5};
static const qkv_frequencies frequencies[] = {
    OF(.rotary_dim = 64),
    OF(.rotary_dim = 6, .factors = factors, .attention_factor = 1.19),
    OF(.rotary_dim = 128, .base = 500000),
    OF(.rotary_dim = 96, .scaling = QKV_ROPE_LINEAR, .factor = 3),
    OF(.rotary_dim = 50, .scaling = QKV_ROPE_NTK, .factor = 2.5),
    OF(.rotary_dim = 128, .scaling = QKV_ROPE_DYNAMIC_NTK, .factor = 2, .original_seqlen = 2048, .seqlen = 5000),
    OF(.rotary_dim = 128, .scaling = QKV_ROPE_YARN, .factor = 16, .original_seqlen = 4096),
    OF(.rotary_dim = 64, .scaling = QKV_ROPE_YARN, .base = 150000, .factor = 32, .original_seqlen = 4096, .no_truncate = 1),
    OF(.rotary_dim = 64, .scaling = QKV_ROPE_YARN, .factor = 40, .original_seqlen = 4096, .mscale = 0.707, .mscale_all_dim = 1),
    OF(.rotary_dim = 128, .scaling = QKV_ROPE_LLAMA3, .base = 500000, .factor = 8, .original_seqlen = 8192)};
enum { FREQUENCIES = sizeof frequencies / sizeof *frequencies };

static bool frequencies_case(int n, char *name, qkv_status *status, uint64_t *digest) {
  if (n < 0 || n >= FREQUENCIES) {
    return false;
  }
  snprintf(name, NAME, "frequencies %d", n);
  *status = qkv_frequencies_fill(&frequencies[n], memory[0], sizeof memory[0]);
  *digest = digest_of(memory[0], QKV_F64, QKV_FREQUENCIES_DOUBLES(frequencies[n].rotary_dim));
  return true;
}

static bool rotary_case(int n, char *name, qkv_status *status, uint64_t *digest) {
  static const int64_t starts[] = {0, 1857, 1000000, -2147483647 - 1, 2147483000};
  enum { B = 2, H = 3, N = 12, D = 135 };
  const int type = n % 4, pairing = n / 4 % 2, backward = n / 8 % 2, which = n / 16;
  double table[QKV_FREQUENCIES_DOUBLES(128)];
  qkv_rotary r = qkv_rotary_default();
  if (n < 0 || which >= FREQUENCIES) {
    return false;
  }
  snprintf(name, NAME, "rotary %s %s %s %d", backward ? "backward" : "forward", problem_dtype_of(types[type])->name,
           pairing ? "interleaved" : "half", which);
  fill(memory[0], types[type], B * H * N * D, (uint64_t)n);
  r.batch = B;
  r.num_heads = H;
  r.seqlen = N;
  r.head_dim = D;
  r.pairing = pairing;
  r.start = starts[n % 5];
  r.table = table;
  r.x = qkv_bhsd(memory[0], types[type], H, N, D);
  r.out = qkv_bshd(memory[1], types[type], H, N, D);
  *status = qkv_frequencies_fill(&frequencies[which], table, sizeof table);
  if (*status == QKV_OK) {
    *status = backward ? qkv_rotary_backward(NULL, &r) : qkv_rotary_forward(NULL, &r);
  }
  *digest = digest_of(memory[1], types[type], B * H * N * D);
  return true;
}

static bool bias_case(int n, char *name, qkv_status *status, uint64_t *digest) {
  static const int64_t settings[][2] = {{32, 128}, {320, 800}, {16, 1000}, {33, 99}};
  enum { H = 3, Q = 40, K = 150 };
  const int type = n % 4, causal = n / 4 % 2, backward = n / 8 % 2, which = n / 16;
  qkv_relative r = qkv_relative_default();
  if (n < 0 || which >= 4) {
    return false;
  }
  snprintf(name, NAME, "relative %s %s %s %d", backward ? "backward" : "forward", problem_dtype_of(types[type])->name,
           causal ? "causal" : "both", which);
  r.num_buckets = settings[which][0];
  r.max_distance = settings[which][1];
  r.causal = causal;
  r.num_heads = H;
  r.seqlen_q = Q;
  r.seqlen_kv = K;
  r.q_position = 70;
  r.table = qkv_strided(memory[0], types[type], 0, 1, H, 0);
  r.bias = qkv_bhsd(memory[1], types[type], H, Q, K);
  fill(memory[backward], types[type], backward ? H * Q * K : H * r.num_buckets, (uint64_t)n);
  *status = backward ? qkv_relative_backward(NULL, &r) : qkv_relative_forward(NULL, &r);
  *digest = digest_of(memory[1 - backward], types[type], backward ? H * r.num_buckets : H * Q * K);
  return true;
}

static bool slopes_case(int n, char *name, qkv_status *status, uint64_t *digest) {
  static const int heads[] = {12, 40, 64, 1000};
  const int type = n % 2;
  if (n < 0 || n >= 8) {
    return false;
  }
  const qkv_tensor to = qkv_per_head(memory[0], types[type]);
  snprintf(name, NAME, "slopes %s %d", problem_dtype_of(types[type])->name, heads[n / 2]);
  *status = qkv_alibi_slopes(heads[n / 2], 0, heads[n / 2], &to);
  *digest = digest_of(memory[0], types[type], heads[n / 2]);
  return true;
}

typedef bool case_fn(int n, char *name, qkv_status *status, uint64_t *digest);
static case_fn *const kinds[] = {sinusoidal_case, frequencies_case, rotary_case, bias_case, slopes_case};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* ---- The file ------------------------------------------------------------------------------------------------------ */

int position_digest_write(const char *path) {
  char name[NAME];
  qkv_status status = QKV_OK;
  uint64_t digest = 0;
  FILE *file = fopen(path, "w");
  if (file == NULL) {
    fprintf(stderr, "%s: cannot be written\n", path);
    return 2;
  }
  fprintf(file, "# Digests of positions: test_position_digest --write FILE\n");
  for (int k = 0; k < KINDS; k++) {
    for (int n = 0; kinds[k](n, name, &status, &digest); n++) {
      if (status != QKV_OK) {
        fprintf(stderr, "%s: %s\n", name, qkv_status_text(status));
        fclose(file);
        return 2;
      }
      fprintf(file, "%016" PRIx64 " %s\n", digest, name);
    }
  }
  return fclose(file) == 0 ? 0 : 2;
}

/* The next line that is not a comment: its digest and name. */
static bool next_line(FILE *file, uint64_t *digest, char name[NAME]) {
  char line[NAME + 32], *text;
  while (fgets(line, sizeof line, file) != NULL) {
    line[strcspn(line, "\n")] = 0;
    if (line[0] == '#') {
      continue;
    }
    *digest = strtoull(line, &text, 16);
    if (text != line + 16 || *text != ' ' || strlen(text + 1) >= NAME) {
      return false;
    }
    memcpy(name, text + 1, strlen(text + 1) + 1);
    return true;
  }
  return false;
}

int position_digest_compare(const char *path) {
  char name[NAME], expected_name[NAME];
  qkv_status status = QKV_OK;
  uint64_t digest = 0, expected = 0;
  long equal = 0, wrong = 0;
  FILE *file = fopen(path, "r");
  if (file == NULL) {
    fprintf(stderr, "%s: cannot be read\n", path);
    return 2;
  }
  for (int k = 0; k < KINDS; k++) {
    for (int n = 0; kinds[k](n, name, &status, &digest); n++) {
      if (!next_line(file, &expected, expected_name) || strcmp(name, expected_name) != 0) {
        fprintf(stderr, "%s: no digest of '%s' where it should be\n", path, name);
        fclose(file);
        return 2;
      }
      if (status == QKV_OK && digest == expected) {
        equal++;
      } else {
        wrong++;
        printf("%s: %016" PRIx64 ", not %016" PRIx64 " (%s)\n", name, digest, expected, qkv_status_text(status));
      }
    }
  }
  fclose(file);
  printf("positions: %ld digests equal, %ld not\n", equal, wrong);
  return wrong != 0;
}
