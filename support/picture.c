#include "picture.h"

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <png.h>

#include "file.h"
#include "text.h"

/* ---- Pictures and palettes --------------------------------------------------------------------------------------- */

int picture_create(picture *p, int64_t width, int64_t height) {
  memset(p, 0, sizeof *p);
  if (width < 1 || height < 1 || width > 32768 || height > 32768) return -1;
  p->cells = calloc((size_t)height, (size_t)width);
  if (p->cells == NULL) return -1;
  p->width = width;
  p->height = height;
  for (int i = 0; i < 256; i++) memset(p->palette[i], 255 - i, 3);
  return 0;
}

void picture_free(picture *p) {
  free(p->cells);
  memset(p, 0, sizeof *p);
}

typedef struct stop {
  double at;
  unsigned char color[3];
} stop;

/* Colours between the stops, which begin at 0 and end at 1, for the entries first to 255. */
static void blend(picture *p, int first, const stop *stops) {
  for (int i = first; i < 256; i++) {
    double t = (double)(i - first) / (255 - first);
    const stop *s = stops;
    while (t > s[1].at) s++;
    double part = (t - s[0].at) / (s[1].at - s[0].at);
    for (int c = 0; c < 3; c++)
      p->palette[i][c] = (unsigned char)lround(s[0].color[c] + part * (s[1].color[c] - s[0].color[c]));
  }
}

void picture_palette_shares(picture *p) {
  static const stop stops[] = {{0, {244, 244, 240}}, {0.02, {206, 221, 236}}, {0.5, {96, 146, 196}}, {1, {21, 62, 117}}};
  blend(p, 0, stops);
}

void picture_palette_heat(picture *p) {
  static const stop stops[] = {{0, {16, 12, 40}},      {0.25, {74, 22, 104}}, {0.5, {158, 42, 99}},
                               {0.75, {229, 107, 46}}, {0.9, {250, 191, 74}}, {1, {255, 250, 205}}};
  static const unsigned char invisible[3] = {214, 214, 218};
  blend(p, 1, stops);
  memcpy(p->palette[0], invisible, 3);
}

int picture_scale(const picture *p, int pixels) {
  int64_t longer = p->width > p->height ? p->width : p->height;
  int64_t scale = pixels / longer;
  return scale < 1 ? 1 : (int)scale;
}

/* ---- PNG --------------------------------------------------------------------------------------------------------- */

typedef struct png_failure {
  char *error;
  size_t error_bytes;
  const char *path;
} png_failure;

static void on_error(png_structp png, png_const_charp message) {
  png_failure *f = png_get_error_ptr(png);
  text_fail(f->error, f->error_bytes, "%s: cannot write: %s", f->path, message);
  png_longjmp(png, 1);
}

static void on_warning(png_structp png, png_const_charp message) {
  (void)png;
  (void)message;
}

/* libpng's way out of an error is longjmp: this function has no local state that it could lose. */
static int encode(png_structp png, png_infop info, const picture *p, int scale, png_bytep row, FILE *stream) {
  if (setjmp(png_jmpbuf(png))) return -1;
  png_color palette[256];
  for (int i = 0; i < 256; i++) {
    palette[i].red = p->palette[i][0];
    palette[i].green = p->palette[i][1];
    palette[i].blue = p->palette[i][2];
  }
  png_init_io(png, stream);
  png_set_IHDR(png, info, (png_uint_32)(p->width * scale), (png_uint_32)(p->height * scale), 8, PNG_COLOR_TYPE_PALETTE,
               PNG_INTERLACE_NONE, PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
  png_set_PLTE(png, info, palette, 256);
  if (p->title != NULL) {
    png_text text;
    memset(&text, 0, sizeof text);
    text.compression = PNG_TEXT_COMPRESSION_NONE;
    text.key = (png_charp) "Title";
    text.text = (png_charp)(uintptr_t)p->title;
    png_set_text(png, info, &text, 1);
  }
  png_write_info(png, info);
  for (int64_t y = 0; y < p->height; y++) {
    const unsigned char *cells = p->cells + y * p->width;
    for (int64_t x = 0; x < p->width; x++) memset(row + x * scale, cells[x], (size_t)scale);
    for (int i = 0; i < scale; i++) png_write_row(png, row);
  }
  png_write_end(png, info);
  return 0;
}

int picture_write_png(const picture *p, const char *path, int scale, char *error, size_t error_bytes) {
  output o;
  png_failure failure = {error, error_bytes, path};
  if (output_open(&o, path, error, error_bytes) != 0) return -1;
  int result = -1;
  png_bytep row = malloc((size_t)p->width * (size_t)scale);
  png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, &failure, on_error, on_warning);
  png_infop info = png != NULL ? png_create_info_struct(png) : NULL;
  if (row == NULL || info == NULL) {
    text_fail(error, error_bytes, "%s: out of memory", path);
  } else {
    result = encode(png, info, p, scale, row, o.stream);
  }
  png_destroy_write_struct(&png, &info);
  free(row);
  if (result == 0) return output_commit(&o, error, error_bytes);
  output_discard(&o);
  return -1;
}

/* ---- SVG --------------------------------------------------------------------------------------------------------- */

static void write_escaped(FILE *stream, const char *text) {
  for (; *text != 0; text++) {
    switch (*text) {
    case '&': fputs("&amp;", stream); break;
    case '<': fputs("&lt;", stream); break;
    case '>': fputs("&gt;", stream); break;
    case '"': fputs("&quot;", stream); break;
    default:
      if ((unsigned char)*text >= 32) fputc(*text, stream);
      break;
    }
  }
}

int picture_write_svg(const picture *p, const char *path, int scale, char *error, size_t error_bytes) {
  enum { LEFT = 28, TOP = 34, RIGHT = 12, BOTTOM = 28 };
  output o;
  if (output_open(&o, path, error, error_bytes) != 0) return -1;
  FILE *f = o.stream;
  long long width = p->width * scale, height = p->height * scale;
  fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%lld\" height=\"%lld\" font-family=\"sans-serif\">\n",
          width + LEFT + RIGHT, height + TOP + BOTTOM);
  if (p->title != NULL) {
    fputs("<title>", f);
    write_escaped(f, p->title);
    fputs("</title>\n", f);
    fprintf(f, "<text x=\"%d\" y=\"22\" font-size=\"14\">", LEFT);
    write_escaped(f, p->title);
    fputs("</text>\n", f);
  }
  if (p->x_label != NULL) {
    fprintf(f, "<text x=\"%lld\" y=\"%lld\" font-size=\"12\" text-anchor=\"middle\">", LEFT + width / 2, height + TOP + 19);
    write_escaped(f, p->x_label);
    fputs("</text>\n", f);
  }
  if (p->y_label != NULL) {
    fprintf(f, "<text transform=\"translate(18 %lld) rotate(-90)\" font-size=\"12\" text-anchor=\"middle\">",
            TOP + height / 2);
    write_escaped(f, p->y_label);
    fputs("</text>\n", f);
  }
  /* The commonest cell is the background; the rest are runs of equal cells along a row. */
  int64_t often[256] = {0};
  int background = 0;
  for (int64_t i = 0; i < p->width * p->height; i++) often[p->cells[i]]++;
  for (int i = 0; i < 256; i++) {
    if (often[i] > often[background]) background = i;
  }
  fprintf(f, "<g transform=\"translate(%d %d) scale(%d)\" shape-rendering=\"crispEdges\">\n", LEFT, TOP, scale);
  fprintf(f, "<rect width=\"%lld\" height=\"%lld\" fill=\"#%02x%02x%02x\"/>\n", (long long)p->width, (long long)p->height,
          p->palette[background][0], p->palette[background][1], p->palette[background][2]);
  for (int64_t y = 0; y < p->height; y++) {
    const unsigned char *cells = p->cells + y * p->width;
    for (int64_t x = 0; x < p->width;) {
      int64_t end = x + 1;
      while (end < p->width && cells[end] == cells[x]) end++;
      const unsigned char *color = p->palette[cells[x]];
      if (cells[x] != background) {
        fprintf(f, "<rect x=\"%lld\" y=\"%lld\" width=\"%lld\" height=\"1\" fill=\"#%02x%02x%02x\"/>\n", (long long)x,
                (long long)y, (long long)(end - x), color[0], color[1], color[2]);
      }
      x = end;
    }
  }
  fputs("</g>\n", f);
  fprintf(f, "<rect x=\"%d\" y=\"%d\" width=\"%lld\" height=\"%lld\" fill=\"none\" stroke=\"#888\"/>\n</svg>\n", LEFT, TOP,
          width, height);
  return output_commit(&o, error, error_bytes);
}

static int has_suffix(const char *path, const char *suffix) {
  size_t length = strlen(path), wanted = strlen(suffix);
  return length > wanted && strcmp(path + length - wanted, suffix) == 0;
}

int picture_check_name(const char *path, char *error, size_t error_bytes) {
  if (has_suffix(path, ".svg") || has_suffix(path, ".png")) return 0;
  return text_fail(error, error_bytes, "%s: the name of a picture must end in .png or .svg", path);
}

int picture_write(const picture *p, const char *path, int scale, char *error, size_t error_bytes) {
  if (picture_check_name(path, error, error_bytes) != 0) return -1;
  if (has_suffix(path, ".svg")) return picture_write_svg(p, path, scale, error, error_bytes);
  return picture_write_png(p, path, scale, error, error_bytes);
}

/* ---- Attention maps ---------------------------------------------------------------------------------------------- */

int heat_map_create(heat_map *m, int64_t rows, int64_t keys, int64_t max_width, int64_t max_height, double floor) {
  memset(m, 0, sizeof *m);
  if (rows < 1 || keys < 1) return -1;
  if (picture_create(&m->image, keys < max_width ? keys : max_width, rows < max_height ? rows : max_height) != 0) return -1;
  m->largest = calloc((size_t)(m->image.width * m->image.height), sizeof *m->largest);
  if (m->largest == NULL) {
    picture_free(&m->image);
    return -1;
  }
  m->rows = rows;
  m->keys = keys;
  m->floor = floor;
  picture_palette_heat(&m->image);
  return 0;
}

static float *row_of(heat_map *m, int64_t row) { return m->largest + row * m->image.height / m->rows * m->image.width; }

static void raise(float *cell, float weight) {
  if (weight > *cell) *cell = weight;
}

void heat_map_add_f32(heat_map *m, int64_t row, const float *weights) {
  float *cells = row_of(m, row);
  for (int64_t key = 0; key < m->keys; key++) raise(&cells[key * m->image.width / m->keys], weights[key]);
}

void heat_map_add_f64(heat_map *m, int64_t row, const double *weights) {
  float *cells = row_of(m, row);
  for (int64_t key = 0; key < m->keys; key++) raise(&cells[key * m->image.width / m->keys], (float)weights[key]);
}

void heat_map_finish(heat_map *m) {
  double depth = -log(m->floor);
  for (int64_t i = 0; i < m->image.width * m->image.height; i++) {
    float weight = m->largest[i];
    if (!(weight > 0)) continue;
    double level = 1 + log((double)weight) / depth;
    m->image.cells[i] = (unsigned char)(1 + lround(254 * fmin(fmax(level, 0), 1)));
  }
}

void heat_map_free(heat_map *m) {
  free(m->largest);
  picture_free(&m->image);
  memset(m, 0, sizeof *m);
}
