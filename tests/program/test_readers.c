/* Readers of .npy, .safetensors and mask expressions: right values, and the exact message for each wrong file. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "array.h"
#include "load.h"
#include "mask_text.h"
#include "npy.h"
#include "safetensors.h"

#define LENGTH(a) (sizeof(a) / sizeof((a)[0]))

/* ---- .npy -------------------------------------------------------------------------------------------------------- */

/* A file of version `major`.0 with this dictionary; returns its size. */
static size_t make_npy(unsigned char *to, int major, const char *dictionary, const void *data, size_t bytes) {
  size_t length = strlen(dictionary), at = 0;
  const unsigned char magic[] = {0x93, 'N', 'U', 'M', 'P', 'Y', (unsigned char)major, 0};
  memcpy(to, magic, sizeof magic);
  at = sizeof magic;
  for (int byte = 0; byte < (major == 1 ? 2 : 4); byte++) to[at++] = (unsigned char)(length >> 8 * byte);
  memcpy(to + at, dictionary, length);
  if (bytes > 0) memcpy(to + at + length, data, bytes);
  return at + length + bytes;
}

static int parse(array *a, int major, const char *dictionary, const void *data, size_t bytes, char *error, size_t size) {
  unsigned char scratch[1024];
  size_t all = make_npy(scratch, major, dictionary, data, bytes);
  /* An exact copy: a memory checker sees a byte too many. */
  unsigned char *file = malloc(all);
  assert_non_null(file);
  memcpy(file, scratch, all);
  int result = npy_parse("x.npy", file, all, a, error, size);
  free(file);
  return result;
}

static void test_npy_dtypes(void **state) {
  (void)state;
  static const unsigned char half[] = {0x00, 0x3c, 0x00, 0xc0, 0x01, 0x00, 0xff, 0x7b, 0x00, 0xfc, 0x01, 0x7e};
  static const unsigned char single[] = {0x00, 0x00, 0x80, 0x3f, 0x00, 0x00, 0x00, 0xc0};
  static const unsigned char real[] = {0, 0, 0, 0, 0, 0, 0xf0, 0x3f, 0, 0, 0, 0, 0, 0, 0, 0xc0};
  static const unsigned char word[] = {1, 0, 0, 0, 0xfe, 0xff, 0xff, 0xff};
  static const unsigned char wide[] = {1, 0, 0, 0, 0, 0, 0, 0, 0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
  static const unsigned char byte[] = {7, 0};
  char error[512] = "";
  array a;
  for (int major = 1; major <= 3; major++) {
    assert_int_equal(
        parse(&a, major, "{'descr': '<f2', 'fortran_order': False, 'shape': (6,), }", half, 12, error, sizeof error), 0);
    assert_int_equal(a.dtype, QKV_F32);
    assert_int_equal(a.rank, 1);
    assert_int_equal(a.shape[0], 6);
    const float *f = a.data;
    assert_true(f[0] == 1 && f[1] == -2 && f[2] == 0x1p-24f && f[3] == 65504 && f[4] == -INFINITY && isnan(f[5]));
    array_free(&a);
  }
  assert_int_equal(parse(&a, 1, "{\"shape\":(2),'descr':'<f4','fortran_order':False}", single, 8, error, sizeof error), 0);
  assert_true(a.dtype == QKV_F32 && ((const float *)a.data)[0] == 1 && ((const float *)a.data)[1] == -2);
  array_free(&a);
  assert_int_equal(
      parse(&a, 1, "{'descr': '<f8', 'fortran_order': False, 'shape': (2L,), }  \n", real, 16, error, sizeof error), 0);
  assert_true(a.dtype == QKV_F64 && ((const double *)a.data)[0] == 1 && ((const double *)a.data)[1] == -2);
  array_free(&a);
  assert_int_equal(parse(&a, 1, "{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }", word, 8, error, sizeof error),
                   0);
  assert_true(a.dtype == QKV_I32 && ((const int32_t *)a.data)[0] == 1 && ((const int32_t *)a.data)[1] == -2);
  array_free(&a);
  assert_int_equal(parse(&a, 1, "{'descr': '<i8', 'fortran_order': False, 'shape': (2,), }", wide, 16, error, sizeof error),
                   0);
  assert_true(a.dtype == QKV_I32 && ((const int32_t *)a.data)[0] == 1 && ((const int32_t *)a.data)[1] == -2);
  array_free(&a);
  assert_int_equal(parse(&a, 1, "{'descr': '|b1', 'fortran_order': False, 'shape': (2,), }", byte, 2, error, sizeof error),
                   0);
  assert_true(a.dtype == QKV_U8 && ((const uint8_t *)a.data)[0] == 1 && ((const uint8_t *)a.data)[1] == 0);
  array_free(&a);
  assert_int_equal(parse(&a, 1, "{'descr': '|u1', 'fortran_order': False, 'shape': (2,), }", byte, 2, error, sizeof error),
                   0);
  assert_true(a.dtype == QKV_U8 && ((const uint8_t *)a.data)[0] == 7);
  array_free(&a);
}

static void test_npy_shapes(void **state) {
  (void)state;
  static const unsigned char bytes[] = {0, 1, 2, 3, 4, 5};
  char error[512] = "";
  array a;
  assert_int_equal(parse(&a, 1, "{'descr': '|u1', 'fortran_order': True, 'shape': (2, 3), }", bytes, 6, error, sizeof error),
                   0);
  assert_true(a.rank == 2 && a.stride[0] == 1 && a.stride[1] == 2);
  array_free(&a);
  assert_int_equal(
      parse(&a, 1, "{'descr': '|u1', 'fortran_order': False, 'shape': (2, 3), }", bytes, 6, error, sizeof error), 0);
  assert_true(a.rank == 2 && a.stride[0] == 3 && a.stride[1] == 1);
  array_free(&a);
  assert_int_equal(parse(&a, 1, "{'descr': '|u1', 'fortran_order': False, 'shape': (), }", bytes, 1, error, sizeof error),
                   0);
  assert_true(a.rank == 0 && a.data != NULL);
  array_free(&a);
  assert_int_equal(
      parse(&a, 1, "{'descr': '<f8', 'fortran_order': False, 'shape': (3, 0, 2, 1), }", bytes, 0, error, sizeof error), 0);
  assert_true(a.rank == 4 && a.shape[1] == 0 && a.data != NULL);
  array_free(&a);
}

static void test_npy_errors(void **state) {
  (void)state;
  static const struct {
    const char *dictionary, *message;
  } cases[] = {
      {"", "x.npy: header: expected '{' at character 0"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (4,), ",
       "x.npy: header: expected a quoted key or '}' at character 56"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (4,)} x",
       "x.npy: header: expected the end of the header at character 56"},
      {"{'descr': '<f4', 'fortran_order': Maybe, 'shape': (4,)}", "x.npy: header: expected True or False at character 34"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (4;)}", "x.npy: header: expected ',' or ')' at character 52"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (-4,)}",
       "x.npy: header: expected a non-negative integer or ')' at character 51"},
      {"{'descr': '<f4', 'fortran_order': False}", "x.npy: header: no 'shape'"},
      {"{'descr': '<f4', 'shape': (4,)}", "x.npy: header: no 'fortran_order'"},
      {"{'fortran_order': False, 'shape': (4,)}", "x.npy: header: no 'descr'"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (4,), 'x': 1}", "x.npy: header: unknown key 'x' at character 56"},
      {"{'descr': '<f4", "x.npy: header: expected a closing quote at character 14"},
      {"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (4,)}", "x.npy: a structured dtype is not supported"},
      {"{'descr': '>f4', 'fortran_order': False, 'shape': (4,)}",
       "x.npy: dtype '>f4' is big-endian, which is not supported; in numpy: a.astype('<f4')"},
      {"{'descr': '=f4', 'fortran_order': False, 'shape': (4,)}",
       "x.npy: dtype '=f4' does not say its byte order; '<f4' is supported"},
      {"{'descr': '<c8', 'fortran_order': False, 'shape': (4,)}",
       "x.npy: dtype '<c8' is not supported (f2, f4, f8, i4, i8, u1 and bool are)"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 1, 1, 1)}", "x.npy: rank 5, at most 4 is supported"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (5,)}",
       "x.npy: truncated: shape (5,) of dtype '<f4' needs 20 bytes of data, the file has 16"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}",
       "x.npy: shape (4294967296, 4294967296) does not fit the address space"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (0, 4294967296, 4294967296)}",
       "x.npy: shape (0, 4294967296, 4294967296) does not fit the address space"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
       "x.npy: an extent of the shape does not fit in 63 bits"},
      {"{'descr': '<i8', 'fortran_order': False, 'shape': (2,)}", "x.npy: element 1 does not fit in 32 bits"},
  };
  static const unsigned char data[16] = {1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0};
  for (size_t i = 0; i < LENGTH(cases); i++) {
    char error[512] = "";
    array a;
    assert_int_equal(parse(&a, 1, cases[i].dictionary, data, sizeof data, error, sizeof error), -1);
    assert_string_equal(error, cases[i].message);
    assert_null(a.data);
  }
}

static void test_npy_preamble(void **state) {
  (void)state;
  static const struct {
    const char *bytes;
    size_t size;
    const char *message;
  } cases[] = {
      {"", 0, "x.npy: truncated: 0 bytes are less than any .npy header"},
      {"\x93NUM", 4, "x.npy: truncated: 4 bytes are less than any .npy header"},
      {"\x93NUMPY\2\0\0\0\0", 11, "x.npy: truncated: 11 bytes are less than any .npy header"},
      {"PK\3\4 and more", 13, "x.npy: not a .npy file: it does not begin with \\x93NUMPY"},
      {"\x93NUMPY\4\0\0\0\0\0", 12, "x.npy: .npy version 4.0 is not supported (1.0, 2.0 and 3.0 are)"},
      {"\x93NUMPY\1\1\0\0\0\0", 12, "x.npy: .npy version 1.1 is not supported (1.0, 2.0 and 3.0 are)"},
      {"\x93NUMPY\1\0\x70\1{}", 12, "x.npy: the header claims 368 bytes, but the file has only 2 after the preamble"},
      {"\x93NUMPY\2\0\xff\xff\xff\xff{}", 14,
       "x.npy: the header claims 4294967295 bytes, but the file has only 2 after the preamble"},
  };
  for (size_t i = 0; i < LENGTH(cases); i++) {
    char error[512] = "";
    array a;
    unsigned char *file = malloc(cases[i].size + 1);
    assert_non_null(file);
    memcpy(file, cases[i].bytes, cases[i].size);
    assert_int_equal(npy_parse("x.npy", file, cases[i].size, &a, error, sizeof error), -1);
    assert_string_equal(error, cases[i].message);
    free(file);
  }
}

static void test_npy_round_trip(void **state) {
  (void)state;
  static const int32_t dtypes[] = {QKV_F32, QKV_F64, QKV_I32, QKV_U8};
  static const int64_t shape[4] = {2, 3, 1, 5};
  char error[512] = "";
  for (size_t d = 0; d < LENGTH(dtypes); d++) {
    for (int rank = 0; rank <= 4; rank++) {
      array a, b;
      assert_int_equal(array_alloc(&a, dtypes[d], rank, shape), 0);
      size_t bytes = (size_t)array_count(rank, shape, 8) * array_element_size(dtypes[d]);
      for (size_t i = 0; i < bytes; i++) ((unsigned char *)a.data)[i] = (unsigned char)(i * 37 % 101);
      assert_int_equal(npy_write("round.npy", &a, error, sizeof error), 0);
      assert_int_equal(npy_read("round.npy", &b, error, sizeof error), 0);
      assert_true(b.dtype == a.dtype && b.rank == rank);
      assert_memory_equal(a.shape, b.shape, sizeof a.shape);
      assert_memory_equal(a.data, b.data, bytes);
      array_free(&a);
      array_free(&b);
    }
  }
  /* A transposed view is written in C order. */
  static const int64_t square[2] = {2, 3};
  array a, b;
  assert_int_equal(array_alloc(&a, QKV_I32, 2, square), 0);
  for (int i = 0; i < 6; i++) ((int32_t *)a.data)[i] = i;
  array t = a;
  t.shape[0] = 3;
  t.shape[1] = 2;
  t.stride[0] = 1;
  t.stride[1] = 3;
  assert_int_equal(npy_write("round.npy", &t, error, sizeof error), 0);
  assert_int_equal(npy_read("round.npy", &b, error, sizeof error), 0);
  static const int32_t transposed[] = {0, 3, 1, 4, 2, 5};
  assert_memory_equal(b.data, transposed, sizeof transposed);
  array_free(&a);
  array_free(&b);
  assert_int_equal(npy_read("missing.npy", &a, error, sizeof error), -1);
  assert_string_equal(error, "missing.npy: cannot open: No such file or directory");
  assert_int_equal(npy_read(".", &a, error, sizeof error), -1);
  assert_string_equal(error, ".: cannot read: Is a directory");
  assert_int_equal(remove("round.npy"), 0);
}

static void test_f16_against_arithmetic(void **state) {
  (void)state;
  for (unsigned bits = 0; bits < 65536; bits++) {
    int exponent = (int)(bits >> 10 & 31), fraction = (int)(bits & 1023);
    double sign = bits >> 15 ? -1 : 1;
    float got = array_widen_f16((uint16_t)bits);
    if (exponent == 31) {
      if (fraction != 0) {
        assert_true(isnan(got));
      } else {
        assert_true(got == (float)(sign * INFINITY));
      }
      continue;
    }
    double want = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    assert_true(got == (float)(sign * want));
    assert_int_equal(signbit(got) != 0, bits >> 15);
  }
}

static void test_broadcast(void **state) {
  (void)state;
  array a;
  qkv_tensor t;
  static const int64_t shape[4] = {2, 1, 5, 1};
  assert_int_equal(array_alloc(&a, QKV_F32, 4, shape), 0);
  int64_t extent[4] = {2, 3, 5, 7};
  assert_int_equal(array_broadcast(&a, extent, &t), 0);
  assert_true(t.stride[0] == 5 && t.stride[1] == 0 && t.stride[2] == 1 && t.stride[3] == 0);
  int64_t wrong[4] = {3, 3, 5, 7};
  assert_int_equal(array_broadcast(&a, wrong, &t), -1);
  int64_t open[4] = {-1, -1, 5, -1};
  assert_int_equal(array_broadcast(&a, open, &t), 0);
  assert_true(open[0] == 2 && open[1] == -1 && open[3] == -1);
  array_free(&a);
}

/* ---- .safetensors ------------------------------------------------------------------------------------------------ */

static safetensors *parse_safetensors(unsigned char **memory, const char *header, const void *data, size_t bytes,
                                      char *error, size_t error_bytes) {
  size_t length = strlen(header), all = 8 + length + bytes;
  unsigned char *file = malloc(all);
  assert_non_null(file);
  for (int byte = 0; byte < 8; byte++) file[byte] = (unsigned char)((uint64_t)length >> 8 * byte);
  memcpy(file + 8, header, length);
  if (bytes > 0) memcpy(file + 8 + length, data, bytes);
  *memory = file;
  return safetensors_parse("x.safetensors", file, all, error, error_bytes);
}

static void test_safetensors_reads(void **state) {
  (void)state;
  static const char header[] =
      "{\"__metadata__\":{\"format\":\"pt\"},\"b\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[4,8]},"
      "\"a\":{\"dtype\":\"F32\",\"shape\":[1,1],\"data_offsets\":[0,4]},"
      "\"i\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[8,16]},"
      "\"m\":{\"dtype\":\"BOOL\",\"shape\":[2],\"data_offsets\":[16,18]},"
      "\"odd\":{\"dtype\":\"F8_E4M3\",\"shape\":[2],\"data_offsets\":[18,20]},"
      "\"deep\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1],\"data_offsets\":[20,21]},"
      "\"none\":{\"dtype\":\"F64\",\"shape\":[0,3],\"data_offsets\":[21,21]}}    ";
  static const unsigned char data[21] = {0,    0,    0x80, 0x3f, 0xc0, 0x3f, 0,    0xc0, 0xff,
                                         0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0,    9};
  char error[512] = "";
  unsigned char *memory;
  safetensors *file = parse_safetensors(&memory, header, data, sizeof data, error, sizeof error);
  assert_non_null(file);
  assert_int_equal(safetensors_count(file), 7);
  assert_string_equal(safetensors_at(file, 0)->name, "a");
  assert_null(safetensors_at(file, 7));
  assert_null(safetensors_find(file, "c"));
  array a;
  assert_int_equal(safetensors_read(file, safetensors_find(file, "a"), &a, error, sizeof error), 0);
  assert_true(a.dtype == QKV_F32 && a.rank == 2 && ((const float *)a.data)[0] == 1);
  array_free(&a);
  assert_int_equal(safetensors_read(file, safetensors_find(file, "b"), &a, error, sizeof error), 0);
  assert_true(a.dtype == QKV_F32 && ((const float *)a.data)[0] == 1.5f && ((const float *)a.data)[1] == -2);
  array_free(&a);
  assert_int_equal(safetensors_read(file, safetensors_find(file, "i"), &a, error, sizeof error), 0);
  assert_true(a.dtype == QKV_I32 && ((const int32_t *)a.data)[0] == -1);
  array_free(&a);
  assert_int_equal(safetensors_read(file, safetensors_find(file, "m"), &a, error, sizeof error), 0);
  assert_true(a.dtype == QKV_U8 && ((const uint8_t *)a.data)[0] == 0 && ((const uint8_t *)a.data)[1] == 1);
  array_free(&a);
  assert_int_equal(safetensors_read(file, safetensors_find(file, "none"), &a, error, sizeof error), 0);
  assert_true(a.dtype == QKV_F64 && a.shape[0] == 0 && a.shape[1] == 3);
  array_free(&a);
  assert_int_equal(safetensors_read(file, safetensors_find(file, "odd"), &a, error, sizeof error), -1);
  assert_string_equal(error,
                      "x.safetensors: tensor 'odd': dtype F8_E4M3 is not supported (F64, F32, F16, BF16, I32, I64, U8 and "
                      "BOOL are)");
  assert_int_equal(safetensors_read(file, safetensors_find(file, "deep"), &a, error, sizeof error), -1);
  assert_string_equal(error, "x.safetensors: tensor 'deep': rank 5, at most 4 is supported");
  safetensors_close(file);
  free(memory);
}

static void test_safetensors_errors(void **state) {
  (void)state;
  static const struct {
    const char *header, *message;
  } cases[] = {
      {"", "x.safetensors: the header is empty"},
      {"[]", "x.safetensors: the header does not begin with '{'"},
      {"{\"a\":", "x.safetensors: the header is not valid JSON, at byte 4 of it"},
      {"{} x", "x.safetensors: the header has something after its JSON, at byte 3 of it"},
      {"{\"a\":1}", "x.safetensors: tensor 'a': needs dtype, shape and data_offsets"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", "x.safetensors: tensor 'a': needs dtype, shape and data_offsets"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}",
       "x.safetensors: tensor 'a': shape is not a list of non-negative integers"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.5],\"data_offsets\":[0,4]}}",
       "x.safetensors: tensor 'a': shape is not a list of non-negative integers"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}",
       "x.safetensors: tensor 'a': data_offsets is not [begin, end]"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}",
       "x.safetensors: tensor 'a': data_offsets is not [begin, end]"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,12]}}",
       "x.safetensors: truncated: tensor 'a' ends at byte 12 of the data, the file has 8"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]}}",
       "x.safetensors: tensor 'a': shape and dtype F32 make 4 bytes, data_offsets 8"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4503599627370496,4503599627370496],\"data_offsets\":[0,8]}}",
       "x.safetensors: tensor 'a': its shape does not fit the address space"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1e300],\"data_offsets\":[0,8]}}",
       "x.safetensors: tensor 'a': shape is not a list of non-negative integers"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_"
       "offsets\":[2,4]}}",
       "x.safetensors: tensor 'b' overlaps another"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_"
       "offsets\":[1,2]}}",
       "x.safetensors: tensor 'a' appears twice"},
      {"{\"a\":{\"dtype\":\"a type with a long name\",\"shape\":[1],\"data_offsets\":[0,4]}}",
       "x.safetensors: tensor 'a': unknown dtype"},
  };
  static const unsigned char data[8];
  for (size_t i = 0; i < LENGTH(cases); i++) {
    char error[512] = "";
    unsigned char *memory;
    assert_null(parse_safetensors(&memory, cases[i].header, data, sizeof data, error, sizeof error));
    assert_string_equal(error, cases[i].message);
    free(memory);
  }
  char error[512] = "";
  assert_null(safetensors_parse("x.safetensors", data, 5, error, sizeof error));
  assert_string_equal(error, "x.safetensors: truncated: 5 bytes are less than any .safetensors header");
  static const unsigned char longer[10] = {0xff, 0xff, 0, 0, 0, 0, 0, 0, '{', '}'};
  assert_null(safetensors_parse("x.safetensors", longer, 10, error, sizeof error));
  assert_string_equal(error, "x.safetensors: the header claims 65535 bytes, but the file has only 2 after its length");
}

/* ---- Masks ------------------------------------------------------------------------------------------------------- */

/* Any name is a file: ids*.npy of 8 keys, mask*.npy of 4 x 8, len.npy of 2 entries, else missing. */
static int fake_loader(const char *source, array *a, char *error, size_t error_bytes) {
  static const int64_t ids[1] = {8}, dense[2] = {4, 8}, lengths[1] = {2};
  int result;
  if (strncmp(source, "ids", 3) == 0) {
    result = array_alloc(a, QKV_I32, 1, ids);
  } else if (strncmp(source, "mask", 4) == 0) {
    result = array_alloc(a, QKV_U8, 2, dense);
  } else if (strncmp(source, "len", 3) == 0) {
    result = array_alloc(a, QKV_I32, 1, lengths);
  } else {
    snprintf(error, error_bytes, "%s: cannot open", source);
    return -1;
  }
  return result;
}

static const mask_text_extents fake_extents = {2, 1, 4, 8};

static void test_mask_forms(void **state) {
  (void)state;
  static const struct {
    const char *text, *canonical;
  } cases[] = {
      {"causal", "causal"},
      {" none ", "none"},
      {"none & causal", "causal"},
      {"none | causal", "none"},
      {"causal_start&window(255,0)", "causal_start & window(255,0)"},
      {"window(-1, inf)", "window(inf,inf)"},
      {"window( 3 , 4 )", "window(3,4)"},
      {"causal & causal", "causal"},
      {"causal & (causal | prefix(2))", "causal"},
      {"(causal | prefix(2)) & causal", "causal"},
      {"causal | window(1,1) & prefix(4)", "(causal | window(1,1)) & (causal | prefix(4))"},
      {"(causal | window(1,1)) & prefix(4)", "(causal | window(1,1)) & prefix(4)"},
      {"causal || window(1,1) && prefix(4)", "(causal | window(1,1)) & (causal | prefix(4))"},
      {"((window(64,64) | prefix(4))) & documents(ids.npy)", "(window(64,64) | prefix(4)) & documents(ids.npy)"},
      {"window(64,64) | prefix(4)", "window(64,64) | prefix(4)"},
      {"causal & prefix(1) | window(0,0) & prefix(2)",
       "(causal | window(0,0)) & (causal | prefix(2)) & (prefix(1) | window(0,0)) & (prefix(1) | prefix(2))"},
      {"dense( mask a.npy )", "dense(\"mask a.npy\")"},
      {"dense('mask,1.npy',0)", "dense(\"mask,1.npy\")"},
      {"lengths(len.npy) & causal", "causal"},
      {"causal & (lengths(len.npy))", "causal"},
      {"documents(ids.npy) & documents(ids2.npy) & documents(ids.npy)", "documents(ids.npy) & documents(ids2.npy)"},
  };
  for (size_t i = 0; i < LENGTH(cases); i++) {
    static mask_text m, again;
    char error[1024] = "", text[1024];
    if (mask_text_parse(cases[i].text, &fake_extents, fake_loader, &m, error, sizeof error) != 0) fail_msg("%s", error);
    assert_int_equal(mask_text_print(m.terms, m.count, m.sources, text, sizeof text), strlen(cases[i].canonical));
    assert_string_equal(text, cases[i].canonical);
    assert_int_equal(m.lengths.data != NULL, strstr(cases[i].text, "lengths") != NULL);
    assert_int_equal(mask_text_parse(text, &fake_extents, fake_loader, &again, error, sizeof error), 0);
    assert_int_equal(again.count, m.count);
    mask_text_free(&m);
    mask_text_free(&again);
  }
}

/* The list means what the formula means, for every assignment of the terms. */
static void test_mask_distribution(void **state) {
  (void)state;
  static mask_text m;
  char error[512] = "";
  const char *text = "(prefix(0) & prefix(1) | prefix(2)) & (prefix(3) | prefix(0) & (prefix(4) | prefix(1)))";
  assert_int_equal(mask_text_parse(text, NULL, fake_loader, &m, error, sizeof error), 0);
  for (unsigned v = 0; v < 32; v++) {
    int x[5];
    for (int i = 0; i < 5; i++) x[i] = v >> i & 1;
    int want = ((x[0] && x[1]) || x[2]) && (x[3] || (x[0] && (x[4] || x[1])));
    int got = 1, group = 1;
    for (int64_t i = 0; i < m.count; i++) {
      if (m.terms[i].join != QKV_OR) {
        got = got && group;
        group = 0;
      }
      group = group || x[m.terms[i].a];
    }
    assert_int_equal(got && group, want);
  }
  mask_text_free(&m);
}

static void test_mask_terms(void **state) {
  (void)state;
  static mask_text m;
  char error[512] = "";
  assert_int_equal(mask_text_parse("causal_start & window(3,-1) & documents(ids.npy) & dense(mask.npy)", &fake_extents,
                                   fake_loader, &m, error, sizeof error),
                   0);
  assert_int_equal(m.count, 4);
  assert_true(m.terms[0].kind == QKV_MASK_CAUSAL && m.terms[0].a == QKV_ALIGN_START);
  assert_true(m.terms[1].kind == QKV_MASK_WINDOW && m.terms[1].a == 3 && m.terms[1].b == -1);
  assert_true(m.terms[2].kind == QKV_MASK_DOCUMENT && m.terms[2].t.dtype == QKV_I32 && m.terms[2].t.stride[0] == 0 &&
              m.terms[2].t.stride[3] == 1);
  assert_true(m.terms[3].kind == QKV_MASK_DENSE && m.terms[3].t.dtype == QKV_U8 && m.terms[3].t.stride[0] == 0 &&
              m.terms[3].t.stride[2] == 8 && m.terms[3].t.stride[3] == 1);
  mask_text_free(&m);
  /* Unknown extents come from the files. */
  assert_int_equal(mask_text_parse("dense(mask.npy) & lengths(len.npy)", NULL, fake_loader, &m, error, sizeof error), 0);
  assert_true(m.extents.batch == 2 && m.extents.num_heads == -1 && m.extents.seqlen_q == 4 && m.extents.seqlen_kv == 8);
  mask_text_free(&m);
  char small[8];
  qkv_mask terms[2] = {qkv_causal(), qkv_or(qkv_prefix(3))};
  assert_int_equal(mask_text_print(terms, 2, NULL, small, sizeof small), strlen("causal | prefix(3)"));
  assert_string_equal(small, "causal ");
}

static void test_mask_errors(void **state) {
  (void)state;
  static const char terms[] =
      "none, causal, causal_start, window(left,right), prefix(n), lengths(FILE), documents(FILE), dense(FILE), keys(n), queries(n), "
      "global(n), chunk(size), columns(size,last), stride(n), blocks(FILE,block), random(block,count,seed), topk(block,count), "
      "longformer(window,globals), bigbird(block,random,globals,seed), strided(n), fixed(n,summary), sinks_window(sinks,keys)";
  char a_term[1024], no_such[1024];
  snprintf(a_term, sizeof a_term, "a term was expected: %s, or '('\n  ", terms);
  snprintf(no_such, sizeof no_such, "unknown term 'sliding_attention'; there are %s\n  sliding_attention\n  ^", terms);
  const struct {
    const char *text, *first, *second;
    int result;
  } cases[] = {
      {"", a_term, "\n  ^", -1},
      {"causal &", a_term, "causal &\n          ^", -1},
      {"causal & & causal", a_term, "causal & & causal\n           ^", -1},
      {"(causal", "'&', '|' or ')' was expected\n  (causal\n         ^", "", -1},
      {"causal)", "'&', '|' or the end was expected\n  causal)\n        ^", "", -1},
      {"causal causal", "'&', '|' or the end was expected\n  causal causal\n         ^", "", -1},
      {"causl & prefix(3)", "unknown term 'causl'; did you mean 'causal'?\n  causl & prefix(3)\n  ^", "", -1},
      {"causal & windw(1,2)", "unknown term 'windw'; did you mean 'window'?\n  causal & windw(1,2)\n           ^", "", -1},
      {"sliding_attention", no_such, "", -1},
      {"window", "'(' was expected after window\n  window\n        ^", "", -1},
      {"window(255 0)", "',' was expected, and the number of keys to the right\n  window(255 0)\n             ^", "", -1},
      {"window(255,)", "the number of keys to the right was expected, or inf\n  window(255,)\n             ^", "", -1},
      {"window(a,1)", "the number of keys to the left was expected, or inf\n  window(a,1)\n         ^", "", -1},
      {"window(1,2", "')' was expected\n  window(1,2\n            ^", "", -1},
      {"prefix(-1)", "a number that is not negative was expected\n  prefix(-1)\n         ^", "", -1},
      {"prefix(99999999999999999999)", "a number that fits in 63 bits was expected\n", "         ^", -1},
      {"documents()", "the name of a file was expected\n  documents()\n            ^", "", -1},
      {"documents(\"a)", "this quote is not closed\n  documents(\"a)\n            ^", "", -1},
      {"causal | lengths(len.npy)",
       "lengths(...) can only be ANDed to the whole expression: keys beyond a length do not exist\n"
       "  causal | lengths(len.npy)\n           ^",
       "", -1},
      {"lengths(len.npy) & lengths(len.npy)", "lengths(...) is given twice\n", "                     ^", -1},
      {"documents(x.npy)", "x.npy: cannot open\n  documents(x.npy)\n            ^", "", -2},
      {"causal & dense(ids.npy)",
       "ids.npy: bool or u1 that broadcasts to (batch, heads, rows, keys) = (2, 1, 4, 8) was expected, the file has "
       "integers of "
       "shape (8,)\n",
       "                 ^", -2},
      {"documents(len.npy)",
       "len.npy: integers of shape (8,) or (batch, 8) was expected, the file has integers of shape (2,)\n", "            ^",
       -2},
      {"dense('mäsk.npy') & x", "m\xc3\xa4sk.npy: cannot open\n  dense('m\xc3\xa4sk.npy') & x\n        ^", "", -2},
      {"documents('idsä') & x", "unknown term 'x'; there are", "\n                      ^", -1},
  };
  for (size_t i = 0; i < LENGTH(cases); i++) {
    static mask_text m;
    char error[2048] = "";
    assert_int_equal(mask_text_parse(cases[i].text, &fake_extents, fake_loader, &m, error, sizeof error), cases[i].result);
    mask_text_free(&m);
    if (strstr(error, cases[i].first) != error) fail_msg("for '%s':\n%s", cases[i].text, error);
    size_t tail = strlen(cases[i].second);
    if (strcmp(error + strlen(error) - tail, cases[i].second) != 0) fail_msg("for '%s':\n%s", cases[i].text, error);
  }
}

static void test_mask_limits(void **state) {
  (void)state;
  static mask_text m;
  char text[4096], error[4096] = "";
  size_t used = 0;
  for (int i = 0; i < 64; i++) used += (size_t)snprintf(text + used, sizeof text - used, "%sprefix(%d)", i ? "|" : "", i);
  assert_int_equal(mask_text_parse(text, NULL, fake_loader, &m, error, sizeof error), 0);
  assert_int_equal(m.count, 64);
  mask_text_free(&m);
  snprintf(text + used, sizeof text - used, "|prefix(64)");
  assert_int_equal(mask_text_parse(text, NULL, fake_loader, &m, error, sizeof error), -1);
  assert_non_null(strstr(error, "more than 64 terms"));
  mask_text_free(&m);
  /* Seven ORed pairs make 128 groups of seven. */
  used = 0;
  for (int i = 0; i < 7; i++) {
    used += (size_t)snprintf(text + used, sizeof text - used, "%sprefix(%d)&prefix(%d)", i ? "|" : "", 2 * i, 2 * i + 1);
  }
  assert_int_equal(mask_text_parse(text, NULL, fake_loader, &m, error, sizeof error), -1);
  assert_non_null(strstr(error, "more than 64 terms"));
  mask_text_free(&m);
  memset(text, '(', 200);
  text[200] = 0;
  assert_int_equal(mask_text_parse(text, NULL, fake_loader, &m, error, sizeof error), -1);
  assert_non_null(strstr(error, "nested too deeply"));
  mask_text_free(&m);
}

static void test_load(void **state) {
  (void)state;
  static const char header[] = "{\"a:b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}";
  char error[512] = "";
  array a;
  FILE *f = fopen("t:1.safetensors", "wb");
  assert_non_null(f);
  fputc((int)strlen(header), f);
  for (int i = 0; i < 7; i++) fputc(0, f);
  fputs(header, f);
  fputs("xy", f);
  assert_int_equal(fclose(f), 0);
  assert_int_equal(array_load("t:1.safetensors:a:b", &a, error, sizeof error), 0);
  assert_true(a.dtype == QKV_U8 && a.shape[0] == 2 && ((const char *)a.data)[1] == 'y');
  array_free(&a);
  assert_int_equal(array_load("t:1.safetensors:c", &a, error, sizeof error), -1);
  assert_string_equal(error, "t:1.safetensors: no tensor 'c'");
  assert_int_equal(array_load("t:1.safetensors", &a, error, sizeof error), -1);
  assert_string_equal(error, "t:1.safetensors: name the tensor: t:1.safetensors:NAME");
  assert_int_equal(remove("t:1.safetensors"), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_npy_dtypes),
      cmocka_unit_test(test_npy_shapes),
      cmocka_unit_test(test_npy_errors),
      cmocka_unit_test(test_npy_preamble),
      cmocka_unit_test(test_npy_round_trip),
      cmocka_unit_test(test_f16_against_arithmetic),
      cmocka_unit_test(test_broadcast),
      cmocka_unit_test(test_safetensors_reads),
      cmocka_unit_test(test_safetensors_errors),
      cmocka_unit_test(test_mask_forms),
      cmocka_unit_test(test_mask_distribution),
      cmocka_unit_test(test_mask_terms),
      cmocka_unit_test(test_mask_errors),
      cmocka_unit_test(test_mask_limits),
      cmocka_unit_test(test_load),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
