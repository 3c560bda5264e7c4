# cmake -D IN=FILE -D OUT=FILE.c -P embed.cmake: the bytes of IN as descriptor_set.h declares them.
file(READ ${IN} hex HEX)
string(LENGTH "${hex}" digits)
math(EXPR bytes "${digits} / 2")
string(REGEX REPLACE "(................................)" "\\1\n\t" hex "${hex}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," hex "${hex}")
file(WRITE ${OUT} "#include \"descriptor_set.h\"\n\nconst size_t descriptor_set_bytes = ${bytes};\n"
  "const uint8_t descriptor_set[] = {\n\t${hex}\n};\n")
