# tests/coverage has CMake read this file after project(): only the daemon is counted, without
# optimisation, so that each line and branch of its source is there to be counted. All else is built as usual.
function(shardd_coverage)
  foreach(target shardd_daemon shardd)
    target_compile_options(${target} PRIVATE --coverage -O0 -fprofile-update=atomic)
  endforeach()
  target_link_options(shardd_daemon INTERFACE --coverage)
endfunction()
cmake_language(DEFER CALL shardd_coverage)
