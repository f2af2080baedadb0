# Writes OUT, a header with the commit of SOURCE; only if that changed.
set(commit unknown)
find_package(Git QUIET)
if(Git_FOUND)
  execute_process(COMMAND "${GIT_EXECUTABLE}" -C "${SOURCE}" describe --always --dirty --abbrev=12 OUTPUT_VARIABLE output
    RESULT_VARIABLE result OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(result EQUAL 0 AND output)
    set(commit "${output}")
  endif()
endif()
file(CONFIGURE OUTPUT "${OUT}" CONTENT "#define QKV_COMMIT \"${commit}\"\n")
