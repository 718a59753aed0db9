// Every state that a run can reach, each once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "rules.hpp"

namespace model {

struct Found {
  uint64_t states = 0, steps = 0, ends = 0;
  std::string broken;              // empty: nothing
  std::vector<std::string> trace;  // how it came to that
  bool complete = false;
  double seconds = 0;
};

// Depth first: visits all, and finds runs that never end. Least memory.
Found explore(const Config& config, uint64_t most_states);
// Breadth first: the shortest way to the first broken invariant.
Found shortest(const Config& config, uint64_t most_states);

}  // namespace model
