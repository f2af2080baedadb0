# The CBLAS that qkv-nn links, and whether qkv-nn is built unless somebody says otherwise: where one is found, and not inside another
# project. Where none is found nothing is kept, so that it is built as soon as there is one.
set(QKV_CBLAS "openblas;blis;mkl_rt;cblas" CACHE STRING
  "CBLAS with 32-bit integers for qkv-nn: names of libraries, of which the first that is found is taken, or a file")
find_library(QKV_CBLAS_LIBRARY NAMES ${QKV_CBLAS})
mark_as_advanced(QKV_CBLAS_LIBRARY)
if(QKV_CBLAS_LIBRARY)
  option(QKV_BUILD_NN "Build the library qkv-nn, which needs a CBLAS" ${PROJECT_IS_TOP_LEVEL})
elseif(PROJECT_IS_TOP_LEVEL AND NOT DEFINED QKV_BUILD_NN)
  list(JOIN QKV_CBLAS ", " names)
  message(STATUS "qkv-nn is not built: no CBLAS found (${names}; Debian: libopenblas-dev)")
endif()
