# The CBLAS that qkv-nn links, and whether qkv-nn is built unless somebody says otherwise: where one is found, and not inside another
# project.
set(QKV_CBLAS "openblas;blis;mkl_rt;cblas" CACHE STRING
  "CBLAS with 32-bit integers for qkv-nn: names of libraries, of which the first that is found is taken, or a file")
find_library(QKV_CBLAS_LIBRARY NAMES ${QKV_CBLAS})
mark_as_advanced(QKV_CBLAS_LIBRARY)
set(QKV_DEFAULT_NN OFF)
if(PROJECT_IS_TOP_LEVEL)
  if(QKV_CBLAS_LIBRARY)
    set(QKV_DEFAULT_NN ON)
  elseif(NOT DEFINED QKV_BUILD_NN)
    list(JOIN QKV_CBLAS ", " names)
    message(STATUS "qkv-nn is not built: no CBLAS found (${names}; Debian: libopenblas-dev)")
  endif()
endif()
