# find_package(shardd): the imported target shardd::shardd, which is libshardd.so and its headers.
# The paths follow from the place of this file: an installed tree may be moved.
include("${CMAKE_CURRENT_LIST_DIR}/shardd-targets.cmake")
