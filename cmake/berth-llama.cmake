# Builds Berth into an unmodified llama.cpp:
#
#     cmake -B build -DCMAKE_PROJECT_INCLUDE=<prefix>/lib/cmake/berth/berth-llama.cmake
#
# The places CPU_MMAP, CUDA_Host and ARENA can then be used in -ot, and no environment variable is needed. With BUILD_SHARED_LIBS=OFF the
# static library of Berth is linked, otherwise the shared one; -DBERTH_LLAMA_STATIC=ON or OFF chooses. No file of the tree is changed: one
# source is added to the target `ggml`, and ggml-backend-reg.cpp is compiled with a header of Berth's before it (berth-llama.h says why).

# It is read after every project() of the tree, and counts once.
get_property(_berth_llama_done GLOBAL PROPERTY BERTH_LLAMA_DONE)
if(NOT _berth_llama_done)
    set_property(GLOBAL PROPERTY BERTH_LLAMA_DONE TRUE)

    if(CMAKE_VERSION VERSION_LESS 3.19)
        message(FATAL_ERROR "berth-llama.cmake needs CMake 3.19 or newer, this is ${CMAKE_VERSION}")
    endif()
    if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
        message(FATAL_ERROR "Berth runs on Linux only, not on ${CMAKE_SYSTEM_NAME}")
    endif()

    set(berth_FOUND TRUE)
    set(CMAKE_FIND_PACKAGE_NAME berth)
    include("${CMAKE_CURRENT_LIST_DIR}/berth-config.cmake")
    if(NOT berth_FOUND)
        message(FATAL_ERROR "${berth_NOT_FOUND_MESSAGE}")
    endif()
    unset(CMAKE_FIND_PACKAGE_NAME)
    # Programs anywhere in the tree link what `ggml` links.
    set_target_properties(berth::berth berth::static PROPERTIES IMPORTED_GLOBAL TRUE)

    # At the end of the tree's first CMakeLists.txt, when its targets exist.
    set_property(GLOBAL PROPERTY BERTH_LLAMA_DIR "${CMAKE_CURRENT_LIST_DIR}")
    cmake_language(DEFER DIRECTORY "${CMAKE_SOURCE_DIR}" CALL _berth_llama_link)
endif()
unset(_berth_llama_done)

function(_berth_llama_link)
    get_property(dir GLOBAL PROPERTY BERTH_LLAMA_DIR)
    if(NOT TARGET ggml)
        message(FATAL_ERROR "berth-llama.cmake: this build has no target ggml. It is for a tree of llama.cpp or ggml that builds its own ggml "
            "(LLAMA_USE_SYSTEM_GGML=OFF).")
    endif()
    get_target_property(aliased ggml ALIASED_TARGET)
    get_target_property(imported ggml IMPORTED)
    if(aliased OR imported)
        message(FATAL_ERROR "berth-llama.cmake: the target ggml is not built here, so that Berth cannot be added to it.")
    endif()

    # Where the list of backends is, and whether it is written as expected.
    get_target_property(sources ggml SOURCES)
    get_target_property(source_dir ggml SOURCE_DIR)
    set(registry "${source_dir}/ggml-backend-reg.cpp")
    set(lines "")
    if("ggml-backend-reg.cpp" IN_LIST sources AND EXISTS "${registry}")
        file(STRINGS "${registry}" lines REGEX "^ *register_backend\\(ggml_backend_cpu_reg\\(\\)\\);")
    endif()
    list(LENGTH lines count)
    get_target_property(type ggml TYPE)
    get_target_property(definitions ggml COMPILE_DEFINITIONS)
    set(linked FALSE)
    if("GGML_USE_CPU" IN_LIST definitions)
        set(linked TRUE)
    endif()

    set_property(TARGET ggml APPEND PROPERTY SOURCES "${dir}/berth-llama.c")
    if(linked AND count EQUAL 1)
        set_property(SOURCE "${registry}" TARGET_DIRECTORY ggml APPEND PROPERTY COMPILE_OPTIONS "-include;${dir}/berth-llama.h")
        set_property(SOURCE "${registry}" TARGET_DIRECTORY ggml APPEND PROPERTY OBJECT_DEPENDS "${dir}/berth-llama.h")
        set(how "listed after the CPU")
    elseif(linked)
        message(FATAL_ERROR "berth-llama.cmake: ${registry} does not list its backends as every ggml from 0.9.0 to 0.26 does. Load Berth with "
            "GGML_BACKEND_PATH instead.")
    else()
        # GGML_BACKEND_DL: nothing is listed at first.
        set_property(SOURCE "${dir}/berth-llama.c" TARGET_DIRECTORY ggml APPEND PROPERTY COMPILE_DEFINITIONS BERTH_LLAMA_AT_LOAD)
        set(how "listed when the program starts")
    endif()

    if(type STREQUAL "STATIC_LIBRARY")
        set(static TRUE)
    else()
        set(static FALSE)
    endif()
    if(DEFINED BERTH_LLAMA_STATIC)
        set(static "${BERTH_LLAMA_STATIC}")
    endif()
    if(static)
        target_link_libraries(ggml PRIVATE berth::static)
        set(what "libberth.a")
    else()
        target_link_libraries(ggml PRIVATE berth::berth)
        # An installed program, or one built with its installed run path, finds it too.
        get_filename_component(libraries "${BERTH_LIBRARY}" DIRECTORY)
        set_property(TARGET ggml APPEND PROPERTY INSTALL_RPATH "${libraries}")
        set(what "${BERTH_LIBRARY}")
    endif()
    message(STATUS "Berth: ${what}, ${how}")
endfunction()
