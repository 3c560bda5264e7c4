# Installs the pages. In the source tree they link to each other and to sources. A link to what is installed
# elsewhere leads to that place; one to what is not installed becomes text. tests/deploy/package_lists looks at
# all links.

# What no package of the pages has.
set(source_only "client|kernels|proto|tests|docs/img/record|docs/man|deploy/install-deps|Dockerfile")
set(source_only "${source_only}|CHANGELOG\\.md|CONTRIBUTING\\.md|LICENSE")
# share/doc/shardd/docs and share/doc/shardd beside share/shardd
set(shardd_of_docs "../../../shardd")
set(shardd_of_readme "../../shardd")

function(shardd_page from to)
  file(READ ${SHARDD_DOCS_FROM}/${from} text)
  string(REGEX REPLACE "\\[([^]]+)\\]\\((\\.\\./)*(${source_only})(/[^)]*|#[^)]*)?\\)" "\\1" text "${text}")
  if(from MATCHES "^docs/")
    string(REPLACE "](../deploy" "](${shardd_of_docs}" text "${text}")
  elseif(from MATCHES "^deploy/kubernetes/")
    string(REPLACE "](../../docs" "](../../doc/shardd/docs" text "${text}")
  else()
    string(REPLACE "](deploy" "](${shardd_of_readme}" text "${text}")
  endif()
  file(WRITE ${work}/${to} "${text}")
endfunction()

# With a name of its own: another user may have installed before.
string(RANDOM LENGTH 12 name)
set(work ${SHARDD_DOCS_WORK}/pages.${name})
file(GLOB pages RELATIVE ${SHARDD_DOCS_FROM} ${SHARDD_DOCS_FROM}/docs/*.md)
foreach(page README.md CHANGELOG.md ${pages})
  shardd_page(${page} doc/shardd/${page})
endforeach()
shardd_page(deploy/kubernetes/README.md shardd/kubernetes/README.md)
set(to ${SHARDD_DATADIR})
if(NOT IS_ABSOLUTE "${to}")
  set(to ${CMAKE_INSTALL_PREFIX}/${to})
endif()
file(INSTALL DESTINATION "${to}" TYPE DIRECTORY FILES ${work}/doc ${work}/shardd)
file(REMOVE_RECURSE ${work})
