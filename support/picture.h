/* Small pictures of masks and attention maps: one byte per cell that points into a palette. */
#ifndef QKV_SUPPORT_PICTURE_H
#define QKV_SUPPORT_PICTURE_H

#include <stddef.h>
#include <stdint.h>

typedef struct picture {
  int64_t width, height;
  unsigned char *cells;          /* height rows of width, from the top */
  unsigned char palette[256][3]; /* red, green, blue */
  const char *title;             /* written into the file; may be NULL; not owned */
  const char *x_label, *y_label; /* of SVG; may be NULL; not owned */
} picture;

/* Cells 0; a palette of greys from white to black. -1: no memory, or an extent below 1. */
int picture_create(picture *p, int64_t width, int64_t height);
void picture_free(picture *p);

/* Palettes. Shares: 0 nothing visible, 255 everything. Heat: 0 invisible, 1 the least weight shown to 255 the largest. */
void picture_palette_shares(picture *p);
void picture_palette_heat(picture *p);

/* Each cell becomes a square of scale x scale pixels. 0, or -1 with a message. The file is complete or not there. */
int picture_write_png(const picture *p, const char *path, int scale, char *error, size_t error_bytes);
int picture_write_svg(const picture *p, const char *path, int scale, char *error, size_t error_bytes);
/* By the name: .svg or .png. */
int picture_write(const picture *p, const char *path, int scale, char *error, size_t error_bytes);
/* -1 with a message if picture_write would not know the name. */
int picture_check_name(const char *path, char *error, size_t error_bytes);

/* The pixels per cell that make a picture of about `pixels` on its longer side. */
int picture_scale(const picture *p, int pixels);

/* A picture of weights, made row by row: a cell is the largest weight of its rows and keys, on a logarithmic scale from
 * 1 down to `floor` (everything visible and smaller looks like it). */
typedef struct heat_map {
  picture image;
  int64_t rows, keys;
  double floor;
  float *largest;
} heat_map;
int heat_map_create(heat_map *m, int64_t rows, int64_t keys, int64_t max_width, int64_t max_height, double floor);
void heat_map_add_f32(heat_map *m, int64_t row, const float *weights);
void heat_map_add_f64(heat_map *m, int64_t row, const double *weights);
/* Fills `image` from what was added. */
void heat_map_finish(heat_map *m);
void heat_map_free(heat_map *m);

#endif
