# Components: runtime (shared library, program), development (headers, static library, pkg-config and CMake packages, header
# manual), documentation; nn_runtime and nn_development of qkv-nn.
include(CMakePackageConfigHelpers)

set(qkv_cmake_dir "${CMAKE_INSTALL_LIBDIR}/cmake/qkv")

set_target_properties(qkv_static PROPERTIES EXPORT_NAME static)
install(TARGETS qkv qkv_static EXPORT qkv-targets
  RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}" COMPONENT runtime
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT runtime NAMELINK_COMPONENT development
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT development
  INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/qkv" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT development
  FILES_MATCHING PATTERN "*.h" PATTERN "nn.h" EXCLUDE)

install(EXPORT qkv-targets NAMESPACE qkv:: DESTINATION "${qkv_cmake_dir}" COMPONENT development)
if(TARGET qkv_nn)
  # Components of their own: qkv-nn needs a CBLAS, and who does without it need not install one.
  set_target_properties(qkv_nn PROPERTIES EXPORT_NAME nn)
  set_target_properties(qkv_nn_static PROPERTIES EXPORT_NAME nn_static)
  install(TARGETS qkv_nn qkv_nn_static EXPORT qkv-nn-targets
    RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}" COMPONENT nn_runtime
    LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT nn_runtime NAMELINK_COMPONENT nn_development
    ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT nn_development
    INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
  install(FILES "${PROJECT_SOURCE_DIR}/include/qkv/nn.h" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/qkv" COMPONENT nn_development)
  install(EXPORT qkv-nn-targets NAMESPACE qkv:: DESTINATION "${qkv_cmake_dir}" COMPONENT nn_development)
endif()
configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/qkv-config.cmake.in" "${PROJECT_BINARY_DIR}/qkv-config.cmake"
  INSTALL_DESTINATION "${qkv_cmake_dir}" NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
if(PROJECT_VERSION_MAJOR EQUAL 0)
  set(qkv_compatibility SameMinorVersion)
else()
  set(qkv_compatibility SameMajorVersion)
endif()
write_basic_package_version_file("${PROJECT_BINARY_DIR}/qkv-config-version.cmake" COMPATIBILITY ${qkv_compatibility})
install(FILES "${PROJECT_BINARY_DIR}/qkv-config.cmake" "${PROJECT_BINARY_DIR}/qkv-config-version.cmake"
  DESTINATION "${qkv_cmake_dir}" COMPONENT development)

# qkv.pc finds its prefix from its own place, so the tree can be moved; absolute directories stay what they are.
cmake_path(IS_ABSOLUTE CMAKE_INSTALL_LIBDIR qkv_absolute)
if(qkv_absolute)
  set(QKV_PC_PREFIX "${CMAKE_INSTALL_PREFIX}")
else()
  file(RELATIVE_PATH qkv_up "/prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/prefix")
  cmake_path(SET qkv_up NORMALIZE "${qkv_up}")
  string(REGEX REPLACE "/$" "" qkv_up "${qkv_up}")
  set(QKV_PC_PREFIX "\${pcfiledir}/${qkv_up}")
endif()
foreach(name LIBDIR INCLUDEDIR)
  set(QKV_PC_${name} "\${prefix}")
  cmake_path(APPEND QKV_PC_${name} "${CMAKE_INSTALL_${name}}")
endforeach()
# What the static library needs and the shared one has inside already.
function(qkv_private_libraries target to)
  set(text "")
  get_target_property(libraries ${target} INTERFACE_LINK_LIBRARIES)
  foreach(library IN LISTS libraries)
    string(REGEX REPLACE "^\\$<LINK_ONLY:(.*)>$" "\\1" library "${library}")
    if(library MATCHES "^[A-Za-z0-9_+-]+$" AND NOT TARGET ${library})
      string(APPEND text " -l${library}")
    elseif(library MATCHES "^/")
      string(APPEND text " ${library}")
    endif()
  endforeach()
  set(${to} "${text}" PARENT_SCOPE)
endfunction()
qkv_private_libraries(qkv_static QKV_PC_LIBS_PRIVATE)
configure_file("${CMAKE_CURRENT_LIST_DIR}/qkv.pc.in" "${PROJECT_BINARY_DIR}/qkv.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/qkv.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig" COMPONENT development)
if(TARGET qkv_nn)
  qkv_private_libraries(qkv_nn_static QKV_PC_LIBS_PRIVATE)
  configure_file("${CMAKE_CURRENT_LIST_DIR}/qkv-nn.pc.in" "${PROJECT_BINARY_DIR}/qkv-nn.pc" @ONLY)
  install(FILES "${PROJECT_BINARY_DIR}/qkv-nn.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig" COMPONENT nn_development)
endif()

if(TARGET qkv_program)
  # The program finds the library beside it wherever the tree is moved; in /usr the linker knows the place.
  if(UNIX AND NOT APPLE AND NOT CMAKE_INSTALL_PREFIX STREQUAL "/usr" AND NOT qkv_absolute)
    file(RELATIVE_PATH qkv_library_place "/prefix/${CMAKE_INSTALL_BINDIR}" "/prefix/${CMAKE_INSTALL_LIBDIR}")
    set_target_properties(qkv_program PROPERTIES INSTALL_RPATH "$ORIGIN/${qkv_library_place}")
  endif()
  install(TARGETS qkv_program RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}" COMPONENT runtime)
  install(FILES "${PROJECT_SOURCE_DIR}/packaging/completions/qkv"
    DESTINATION "${CMAKE_INSTALL_DATADIR}/bash-completion/completions" COMPONENT runtime)
endif()
foreach(name README.md CHANGELOG.md LICENSE)
  if(EXISTS "${PROJECT_SOURCE_DIR}/${name}")
    install(FILES "${PROJECT_SOURCE_DIR}/${name}" DESTINATION "${CMAKE_INSTALL_DOCDIR}" COMPONENT documentation)
  endif()
endforeach()
