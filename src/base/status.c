#include <qkv/qkv.h>

#include "base/order1.h"

const char *qkv_status_text(qkv_status status) {
  switch (status) {
#define QKV__CASE(name, number, text) \
  case number: return text;
    QKV_STATUS_LIST(QKV__CASE)
#undef QKV__CASE
  default: return "unknown status";
  }
}

int32_t qkv_version(void) { return QKV_VERSION_MAJOR * 10000 + QKV_VERSION_MINOR * 100 + QKV_VERSION_PATCH; }
int32_t qkv_order(void) { return QKV_ORDER; }
