/* qkv mask: what a mask makes visible, and what it saves. */
#include <stdlib.h>
#include <string.h>

#include "array.h"
#include "cli.h"
#include "mask_text.h"
#include "npy.h"
#include "picture.h"

enum { TILE = 64, MESSAGE = 6144 };

typedef struct job {
  const char *expression, *png_path, *svg_path, *blocks_path;
  int tiles, json;
  int64_t seqlen_q, seqlen_kv, batch_entry, head, width;
  int64_t row_begin, row_end, key_begin, key_end;
  int32_t align, position;

  mask_text mask;
  int32_t *positions;
  array out;
  qkv_problem problem;
  char *facts;
} job;

static void help(void) {
  fputs("Usage: qkv mask EXPR --seqlen N [OPTION]...\n"
        "\n"
        "Show which keys a mask lets each query see: a picture (queries downwards, keys to the right), the\n"
        "share of visible pairs, and how many 64 x 64 tiles are full, partly visible or skipped.\n"
        "\n"
        "EXPR joins terms by & and | (& binds tighter) and parentheses:\n"
        "  none, causal, causal_start, window(LEFT,RIGHT), prefix(N), lengths(FILE), documents(FILE),\n"
        "  dense(FILE[,FIRST]); keys(SET), queries(SET), global(SET): these keys are seen by all, these\n"
        "  queries see all, both; SET is N, FROM,TO or FILE; chunk(SIZE[,NEIGHBOURS]),\n"
        "  columns(SIZE,LAST), stride(N[,STEPS]), stride(FILE[,STEPS]) by heads; blocks(FILE,BLOCK),\n"
        "  random(BLOCK,COUNT,SEED[,WINDOW,GLOBALBLOCKS]), topk(BLOCK,COUNT)\n"
        "and patterns: longformer(WINDOW,GLOBALS), bigbird(BLOCK,RANDOM,GLOBALBLOCKS,SEED),\n"
        "strided(N), fixed(N,SUMMARY), sinks_window(SINKS,KEYS).\n"
        "\n"
        "      --seqlen N         number of queries, and of keys\n"
        "      --seqlen-kv M      number of keys, if not N\n"
        "      --align ALIGN      where the queries stand: end (the last query at the last key, the\n"
        "                         default), start (query 0 at key 0), or the position of query 0\n"
        "      --tile             show tiles instead of pairs: full, partly visible, skipped\n"
        "      --rows A:B         show these queries only, A included, B not\n"
        "      --keys A:B         show these keys only\n"
        "      --batch B          the batch entry to show, if the files have several; the default is 0\n"
        "      --head H           the head to show; the default is 0\n"
        "      --width N          columns of the picture in the terminal\n"
        "      --png FILE         write the picture to a PNG file\n"
        "      --svg FILE         write the picture to an SVG file\n"
        "      --json             print the numbers as JSON, and no picture\n"
        "      --blocks FILE      write the lists of the first block map (random, blocks) to a .npy file,\n"
        "                         which blocks(FILE,BLOCK) takes: (batch, heads, rows, places), -1 unused\n",
        stdout);
  cli_print_common_options();
  fputs("\nWhere a cell of the picture stands for many pairs, some of them are looked at; the numbers are\n"
        "exact. Numbers are sums over all batch entries and heads.\n",
        stdout);
  cli_print_exit_status();
  fputs("\nExamples:\n"
        "  qkv mask causal --seqlen 16\n"
        "  qkv mask 'causal & (window(511,0) | prefix(64))' --seqlen 4096 --png mask.png\n"
        "  qkv mask 'causal & window(255,0)' --seqlen 65536 --rows 0:1024 --keys 0:1024 --tile\n",
        stdout);
}

enum {
  OPT_SEQLEN = CLI_OPTION,
  OPT_SEQLEN_KV,
  OPT_ALIGN,
  OPT_TILE,
  OPT_ROWS,
  OPT_KEYS,
  OPT_BATCH,
  OPT_HEAD,
  OPT_WIDTH,
  OPT_PNG,
  OPT_SVG,
  OPT_JSON,
  OPT_BLOCKS
};

static const struct option options[] = {{"seqlen", required_argument, NULL, OPT_SEQLEN},
                                        {"seqlen-kv", required_argument, NULL, OPT_SEQLEN_KV},
                                        {"align", required_argument, NULL, OPT_ALIGN},
                                        {"tile", no_argument, NULL, OPT_TILE},
                                        {"rows", required_argument, NULL, OPT_ROWS},
                                        {"keys", required_argument, NULL, OPT_KEYS},
                                        {"batch", required_argument, NULL, OPT_BATCH},
                                        {"head", required_argument, NULL, OPT_HEAD},
                                        {"width", required_argument, NULL, OPT_WIDTH},
                                        {"png", required_argument, NULL, OPT_PNG},
                                        {"svg", required_argument, NULL, OPT_SVG},
                                        {"json", no_argument, NULL, OPT_JSON},
                                        {"blocks", required_argument, NULL, OPT_BLOCKS},
                                        CLI_COMMON_OPTIONS};

static int parse_option(job *j, int option) {
  const char *name = cli_option_name();
  switch (option) {
  case OPT_SEQLEN: return cli_parse_int(name, optarg, 0, INT32_MAX, &j->seqlen_q);
  case OPT_SEQLEN_KV: return cli_parse_int(name, optarg, 0, INT32_MAX, &j->seqlen_kv);
  case OPT_ALIGN: return cli_parse_align(name, optarg, &j->align, &j->position);
  case OPT_ROWS: return cli_parse_range(name, optarg, &j->row_begin, &j->row_end);
  case OPT_KEYS: return cli_parse_range(name, optarg, &j->key_begin, &j->key_end);
  case OPT_BATCH: return cli_parse_int(name, optarg, 0, INT64_MAX, &j->batch_entry);
  case OPT_HEAD: return cli_parse_int(name, optarg, 0, INT64_MAX, &j->head);
  case OPT_WIDTH: return cli_parse_int(name, optarg, 1, 1000, &j->width);
  case OPT_TILE: j->tiles = 1; return CLI_OK;
  case OPT_PNG: j->png_path = optarg; return CLI_OK;
  case OPT_SVG: j->svg_path = optarg; return CLI_OK;
  case OPT_BLOCKS: j->blocks_path = optarg; return CLI_OK;
  default: j->json = 1; return CLI_OK;
  }
}

/* ---- The problem: no data, only extents and the mask ------------------------------------------------------------- */

static int clip(const char *option, int64_t extent, const char *what, int64_t *begin, int64_t *end) {
  if (*end == INT64_MAX) *end = extent > *begin ? extent : *begin;
  if (*end <= extent) return CLI_OK;
  return cli_usage("%s %lld:%lld: there are %lld %s", option, (long long)*begin, (long long)*end, (long long)extent, what);
}

static int set_problem(job *j) {
  static float zero;
  char error[MESSAGE];
  mask_text_extents extents = {-1, -1, j->seqlen_q, j->seqlen_kv};
  int result = mask_text_parse(j->expression, &extents, NULL, &j->mask, error, sizeof error);
  if (result == MASK_TEXT_BAD_FILE) return cli_failure("%s", error);
  if (result != 0) return cli_usage("%s", error);

  qkv_problem *p = &j->problem;
  *p = qkv_problem_default();
  p->batch = j->mask.extents.batch >= 0 ? j->mask.extents.batch : 1;
  p->num_heads = j->mask.extents.num_heads >= 0 ? j->mask.extents.num_heads : 1;
  p->num_kv_heads = p->num_heads;
  p->seqlen_q = j->seqlen_q;
  p->seqlen_kv = j->seqlen_kv;
  p->head_dim = p->head_dim_v = 1;
  p->align = j->align;
  p->mask = j->mask.terms;
  p->mask_count = j->mask.count;
  p->kv_length = j->mask.lengths.data;
  p->q = p->k = p->v = qkv_strided(&zero, QKV_F32, 0, 0, 0, 0);
  /* Nothing writes to it: it takes no memory. */
  const int64_t shape[] = {p->batch, p->num_heads, p->seqlen_q};
  j->positions = malloc(((size_t)p->batch + 1) * sizeof *j->positions);
  if (j->positions == NULL || array_alloc(&j->out, QKV_F32, 3, shape) != 0) return cli_failure("out of memory");
  p->out = qkv_bhsd(j->out.data, QKV_F32, p->num_heads, p->seqlen_q, 1);
  if (j->align == QKV_ALIGN_EXPLICIT) {
    for (int64_t b = 0; b < p->batch; b++) j->positions[b] = j->position;
    p->q_position = j->positions;
  }
  if (mask_text_needs_data(&j->mask)) return cli_usage("topk(...) selects by q and k: qkv run and qkv bench have them");
  if (mask_text_complete(&j->mask, NULL, p, error, sizeof error) != 0) return cli_failure("%s", error);

  if (p->batch > 0 && j->batch_entry >= p->batch) {
    return cli_usage("--batch %lld: there are %lld batch entries", (long long)j->batch_entry, (long long)p->batch);
  }
  if (p->num_heads > 0 && j->head >= p->num_heads) {
    return cli_usage("--head %lld: there are %lld heads", (long long)j->head, (long long)p->num_heads);
  }
  int status = clip("--rows", p->seqlen_q, "queries", &j->row_begin, &j->row_end);
  if (status == CLI_OK) status = clip("--keys", p->seqlen_kv, "keys", &j->key_begin, &j->key_end);
  if (status != CLI_OK) return status;

  qkv_status s;
  qkv_context context = qkv_context_default();
  status = cli_choose_isa(NULL, &context.isa_cap);
  if (status != CLI_OK) return status;
  j->facts = cli_describe(&context, p, &s);
  return j->facts != NULL ? CLI_OK : cli_status_failure(s, p);
}

/* ---- The picture ------------------------------------------------------------------------------------------------- */

static int64_t bits_set(uint64_t bits) {
  int64_t n = 0;
  for (; bits != 0; bits &= bits - 1) n++;
  return n;
}

/* Visible pairs of at most 64 x 64. */
static int64_t count_visible(const job *j, int64_t row, int64_t rows, int64_t key, int64_t keys) {
  qkv_tile tile;
  uint64_t bits[TILE];
  int32_t answer = QKV_TILE_NONE;
  memset(&tile, 0, sizeof tile);
  memset(bits, 0, sizeof bits);
  tile.batch = j->batch_entry;
  tile.head = j->head;
  tile.row = row;
  tile.rows = rows;
  tile.key = key;
  tile.keys = keys;
  if (qkv_visible(&j->problem, &tile, bits, &answer) != QKV_OK || answer == QKV_TILE_NONE) return 0;
  if (answer == QKV_TILE_ALL) return rows * keys;
  uint64_t low = rows == TILE ? ~UINT64_C(0) : (UINT64_C(1) << rows) - 1;
  int64_t n = 0;
  for (int64_t k = 0; k < keys; k++) n += bits_set(bits[k] & low);
  return n;
}

/* Pieces of at most 64 that begin at multiples of 64, as the library's tiles do. */
static int64_t pieces(int64_t begin, int64_t end) { return end > begin ? (end - 1) / TILE - begin / TILE + 1 : 0; }

static void piece(int64_t begin, int64_t end, int64_t i, int64_t *from, int64_t *count) {
  int64_t tile = (begin / TILE + i) * TILE;
  *from = tile > begin ? tile : begin;
  int64_t to = tile + TILE < end ? tile + TILE : end;
  *count = to - *from;
}

typedef struct cell {
  int64_t pairs, visible;
  int full, partial, skipped; /* pieces */
} cell;

/* Looks at about `budget` pieces of the rectangle: rows are left out first, because a band along the diagonal that enters a
 * cell is met by each row of it. */
static cell look(const job *j, int64_t row_begin, int64_t row_end, int64_t key_begin, int64_t key_end, int64_t budget) {
  cell c = {0, 0, 0, 0, 0};
  int64_t rows = pieces(row_begin, row_end), keys = pieces(key_begin, key_end);
  int64_t key_samples = keys < budget ? keys : budget;
  int64_t row_samples = budget / (key_samples > 0 ? key_samples : 1);
  if (row_samples > rows) row_samples = rows;
  for (int64_t r = 0; r < row_samples; r++) {
    int64_t row, row_count;
    piece(row_begin, row_end, (2 * r + 1) * rows / (2 * row_samples), &row, &row_count);
    for (int64_t k = 0; k < key_samples; k++) {
      int64_t key, key_count;
      piece(key_begin, key_end, (2 * k + 1) * keys / (2 * key_samples), &key, &key_count);
      int64_t visible = count_visible(j, row, row_count, key, key_count);
      c.pairs += row_count * key_count;
      c.visible += visible;
      if (visible == 0) {
        c.skipped++;
      } else if (visible == row_count * key_count) {
        c.full++;
      } else {
        c.partial++;
      }
    }
  }
  return c;
}

/* From 0 (nothing) to 255 (everything), never one of them for something between. */
static unsigned char shade(const job *j, const cell *c) {
  if (c->visible == 0) return 0;
  if (c->visible == c->pairs) return 255;
  if (j->tiles) return 128;
  double share = (double)c->visible / (double)c->pairs;
  return (unsigned char)(1 + (int)(share * 253));
}

/* The region as width x height cells. Budgets keep it to about 300 thousand looks. */
static int draw(const job *j, int64_t width, int64_t height, picture *p) {
  int64_t rows = j->row_end - j->row_begin, keys = j->key_end - j->key_begin, budget = 300000 / (width * height);
  if (budget < 1) budget = 1;
  if (picture_create(p, width, height) != 0) return cli_failure("no memory for the picture");
  picture_palette_shares(p);
  for (int64_t y = 0; y < height; y++) {
    for (int64_t x = 0; x < width; x++) {
      cell c = look(j, j->row_begin + y * rows / height, j->row_begin + (y + 1) * rows / height,
                    j->key_begin + x * keys / width, j->key_begin + (x + 1) * keys / width, budget);
      p->cells[y * width + x] = shade(j, &c);
    }
    if (cli_interrupted()) return cli_interrupted_failure("no picture was written");
  }
  return CLI_OK;
}

/* In units of pairs, or of tiles with --tile: what one cell need not be smaller than. */
static int64_t units(const job *j, int64_t begin, int64_t end) { return j->tiles ? pieces(begin, end) : end - begin; }

static int print_picture(const job *j) {
  static const char *const unicode[] = {"\u00b7", "\u2591", "\u2592", "\u2593", "\u2588"};
  static const char *const ascii[] = {".", "-", "+", "*", "#"};
  const char *const *marks = cli_is_utf8() ? unicode : ascii;
  int64_t rows = units(j, j->row_begin, j->row_end), keys = units(j, j->key_begin, j->key_end);
  char first[24], last[24];
  snprintf(first, sizeof first, "%lld", (long long)j->row_begin);
  snprintf(last, sizeof last, "%lld", (long long)j->row_end - 1);
  int margin = (int)(strlen(first) > strlen(last) ? strlen(first) : strlen(last));
  int64_t columns = j->width > 0 ? j->width : cli_columns() - margin - 3;
  if (j->width == 0 && columns > 96) columns = 96;
  if (columns < 8) columns = 8;
  /* A character is about twice as high as wide: two of them make a square. */
  int64_t wide = columns / 2;
  int64_t longer = rows > keys ? rows : keys;
  int64_t cells = longer < wide ? longer : wide;
  int64_t height = (rows * cells + longer - 1) / longer, width = (keys * cells + longer - 1) / longer;
  /* The picture's cells are characters, unless a cell is a single pair or tile. */
  int doubled = longer <= wide;
  if (!doubled) width = 2 * width < keys ? 2 * width : keys;

  picture p;
  int status = draw(j, width, height, &p);
  if (status != CLI_OK) {
    picture_free(&p);
    return status;
  }
  printf("%*s  keys %lld to %lld\n", margin, "", (long long)j->key_begin, (long long)j->key_end - 1);
  for (int64_t y = 0; y < height; y++) {
    printf("%*s  ", margin, y == 0 ? first : y == height - 1 ? last : "");
    for (int64_t x = 0; x < width; x++) {
      unsigned char value = p.cells[y * width + x];
      const char *mark = marks[value == 0 ? 0 : value == 255 ? 4 : j->tiles ? 2 : 1 + (value - 1) * 3 / 254];
      fputs(mark, stdout);
      if (doubled) fputs(mark, stdout);
    }
    putchar('\n');
  }
  if (j->tiles) {
    printf("%*s  %s full  %s partly visible  %s skipped\n", margin, "", marks[4], marks[2], marks[0]);
  } else {
    printf("%*s  %s visible  %s%s%s in part  %s hidden\n", margin, "", marks[4], marks[3], marks[2], marks[1], marks[0]);
  }
  picture_free(&p);
  return CLI_OK;
}

static int write_pictures(const job *j) {
  char error[MESSAGE], title[512], mask[400];
  mask_text_print(j->mask.terms, j->mask.count, j->mask.sources, mask, sizeof mask);
  snprintf(title, sizeof title, "%s", mask);
  const char *paths[2] = {j->png_path, j->svg_path};
  for (int i = 0; i < 2; i++) {
    int64_t most = i == 0 ? 512 : 192;
    if (paths[i] == NULL) continue;
    int64_t rows = units(j, j->row_begin, j->row_end), keys = units(j, j->key_begin, j->key_end);
    int64_t longer = rows > keys ? rows : keys, cells = longer < most ? longer : most;
    picture p;
    int status = draw(j, (keys * cells + longer - 1) / longer, (rows * cells + longer - 1) / longer, &p);
    if (status == CLI_OK) {
      p.title = title;
      p.x_label = "key";
      p.y_label = "query";
      int scale = picture_scale(&p, i == 0 ? 512 : 576);
      int result = i == 0 ? picture_write_png(&p, paths[i], scale, error, sizeof error)
                          : picture_write_svg(&p, paths[i], scale, error, sizeof error);
      if (result != 0) status = cli_failure("%s: %s", i == 0 ? "--png" : "--svg", error);
    }
    picture_free(&p);
    if (status != CLI_OK) return status;
  }
  return CLI_OK;
}

/* ---- Numbers ----------------------------------------------------------------------------------------------------- */

static int report(const job *j) {
  static const char *const names[] = {"pairs_all",  "pairs_visible", "pairs_computed",
                                      "tiles_full", "tiles_partial", "tiles_skipped"};
  static const char *const aligns[] = {"end", "start", "explicit"};
  double value[6];
  char mask[4096];
  for (int i = 0; i < 6; i++) value[i] = cli_fact_number(j->facts, names[i]);
  double share = value[0] > 0 ? value[1] / value[0] : 0, gain = 0;
  /* Lanes of a vector that no query fills are computed too: below a few rows that is more than all pairs. */
  if (value[2] > 0) gain = value[0] > value[2] ? value[0] / value[2] : 1;
  mask_text_print(j->mask.terms, j->mask.count, j->mask.sources, mask, sizeof mask);
  if (j->json) {
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "mask", mask);
    cJSON_AddNumberToObject(object, "batch", (double)j->problem.batch);
    cJSON_AddNumberToObject(object, "num_heads", (double)j->problem.num_heads);
    cJSON_AddNumberToObject(object, "seqlen_q", (double)j->seqlen_q);
    cJSON_AddNumberToObject(object, "seqlen_kv", (double)j->seqlen_kv);
    cJSON_AddStringToObject(object, "align", aligns[j->align]);
    for (int i = 0; i < 6; i++) cJSON_AddNumberToObject(object, names[i], value[i]);
    cJSON_AddNumberToObject(object, "share_visible", share);
    cJSON_AddNumberToObject(object, "predicted_gain", gain);
    return cli_print_json(object);
  }
  printf("mask: %s\n", mask);
  printf("pairs_all: %.0f\n", value[0]);
  printf("pairs_visible: %.0f (%.4g %%)\n", value[1], 100 * share);
  printf("pairs_computed: %.0f\n", value[2]);
  printf("tiles: %.0f full, %.0f partial, %.0f skipped\n", value[3], value[4], value[5]);
  if (value[2] > 0) {
    printf("predicted_gain: %.3g (pairs_all / pairs_computed)\n", gain);
  } else {
    puts("predicted_gain: there is nothing to compute");
  }
  return CLI_OK;
}

/* The lists of the first block map. */
static int write_blocks(const job *j) {
  char error[MESSAGE];
  const qkv_block_map *map = NULL;
  for (int64_t i = 0; i < j->mask.count && map == NULL; i++) {
    if (j->mask.terms[i].kind == QKV_MASK_BLOCKS) map = j->mask.terms[i].user;
  }
  if (map == NULL) return cli_usage("--blocks: the mask has no block map");
  const int64_t rows = (map->seqlen_q + map->block - 1) / map->block, lists = map->batch * map->num_heads;
  int64_t most = 0;
  for (int64_t n = 0; n < lists * (rows + 1); n++) {
    if (n % (rows + 1) < rows && map->indptr[n + 1] - map->indptr[n] > most) most = map->indptr[n + 1] - map->indptr[n];
  }
  const int64_t shape[4] = {map->batch, map->num_heads, rows, most};
  array a;
  if (array_alloc(&a, QKV_I32, 4, shape) != 0) return cli_failure("out of memory");
  int32_t *to = a.data;
  for (int64_t n = 0; n < lists * (rows + 1); n++) {
    if (n % (rows + 1) == rows) continue;
    for (int64_t k = 0; k < most; k++) {
      const int64_t at = map->indptr[n] + k;
      *to++ = at < map->indptr[n + 1] ? map->indices[at] : -1;
    }
  }
  int result = npy_write(j->blocks_path, &a, error, sizeof error);
  array_free(&a);
  return result == 0 ? CLI_OK : cli_failure("--blocks: %s", error);
}

static int work(job *j) {
  int status = set_problem(j);
  if (status == CLI_OK && j->blocks_path != NULL) status = write_blocks(j);
  if (status != CLI_OK) return status;
  cli_interrupts();
  int empty = j->row_begin == j->row_end || j->key_begin == j->key_end || j->problem.batch == 0 || j->problem.num_heads == 0;
  if (empty && (j->png_path != NULL || j->svg_path != NULL)) return cli_failure("there are no pairs to show");
  if (!empty && !j->json) status = print_picture(j);
  if (!empty && status == CLI_OK) status = write_pictures(j);
  return status == CLI_OK ? report(j) : status;
}

int qkv_cli_mask(int argc, char **argv) {
  static job j; /* several kilobytes of terms */
  memset(&j, 0, sizeof j);
  j.seqlen_q = j.seqlen_kv = -1;
  j.row_end = j.key_end = INT64_MAX;
  int option;
  while ((option = cli_getopt(argc, argv, options, help)) != -1) {
    if (option == CLI_DONE) return CLI_OK;
    if (option == '?' || parse_option(&j, option) != CLI_OK) return CLI_USAGE;
  }
  if (optind >= argc) return cli_usage("the expression is missing");
  if (optind + 1 < argc) return cli_usage("unexpected argument '%s'; quote the expression", argv[optind + 1]);
  if (j.seqlen_q < 0) return cli_usage("--seqlen is missing");
  if (j.seqlen_kv < 0) j.seqlen_kv = j.seqlen_q;
  j.expression = argv[optind];

  int status = work(&j);
  free(j.facts);
  array_free(&j.out);
  free(j.positions);
  mask_text_free(&j.mask);
  return status;
}
