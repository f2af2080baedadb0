/* Messages for the caller: text of at most `bytes` bytes with the final 0. */
#ifndef QKV_SUPPORT_TEXT_H
#define QKV_SUPPORT_TEXT_H

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#if defined(__GNUC__) || defined(__clang__)
#define TEXT_PRINTF(string, first) __attribute__((format(printf, string, first)))
#else
#define TEXT_PRINTF(string, first)
#endif

/* Writes the message and returns -1, so that `return text_fail(...)` does. */
TEXT_PRINTF(3, 4) static inline int text_fail(char *text, size_t bytes, const char *format, ...) {
  if (text != NULL && bytes > 0) {
    va_list list;
    va_start(list, format);
    vsnprintf(text, bytes, format, list);
    va_end(list);
  }
  return -1;
}

#endif
