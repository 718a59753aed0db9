// A program of named cases: runs the one it is given, or lists them all. A case that does not hold
// ends the program.
#pragma once

#include <cstdio>
#include <map>
#include <string>

namespace cases {

using Cases = std::map<std::string, void (*)()>;

inline int run(const Cases& known, int argc, char** argv) {
  auto found = known.find(argc > 1 ? argv[1] : "");
  if (found == known.end()) {
    for (const auto& [name, run] : known) std::puts(name.c_str());
    return argc > 1 ? 2 : 0;
  }
  found->second();
  return 0;
}

}  // namespace cases
