// model: explores one configuration, and prints what it found as one line of JSON.
//
//   model [--shortest] [--most STATES] [wire=…] [recv=…] [bug=…] [lanes=…] [depth=…] [passes=…]
//         [faults=…] [limit=…] [width=…,…] [shared=1] [drop=1] [whole=1] [fine=1] [any_order=1]
//         [direct=1]
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include "explore.hpp"

namespace {

using model::Config;

template <size_t N>
int index_of(const std::string& value, const char* const (&names)[N]) {
  for (size_t i = 0; i < N; ++i)
    if (value == names[i]) return static_cast<int>(i);
  throw std::invalid_argument("no such value: " + value);
}

constexpr const char* kWires[] = {"shm", "cuda_ipc", "staged", "ucx"};
constexpr const char* kRecvs[] = {"host", "stream", "named"};
constexpr const char* kBugs[] = {
#define MODEL_BUG(name) #name,
    MODEL_BUGS(MODEL_BUG)
#undef MODEL_BUG
};

int number(const std::string& value, int lowest, int highest) {
  int read = std::stoi(value);
  if (read < lowest || read > highest) throw std::invalid_argument("out of range: " + value);
  return read;
}

bool* flag_of(Config& config, const std::string& name) {
  if (name == "shared") return &config.shared;
  if (name == "drop") return &config.drop;
  if (name == "whole") return &config.whole;
  if (name == "fine") return &config.fine;
  if (name == "any_order") return &config.any_order;
  return name == "direct" ? &config.direct : nullptr;
}

void set(Config& config, const std::string& name, const std::string& value) {
  if (name == "wire") {
    config.wire = static_cast<model::Wire>(index_of(value, kWires));
  } else if (name == "recv") {
    config.recv = static_cast<model::Recv>(index_of(value, kRecvs));
  } else if (name == "bug") {
    config.bug = static_cast<model::Bug>(index_of(value, kBugs));
  } else if (name == "width") {
    size_t at = 0;
    for (int& width : config.width) {
      width = number(value.substr(at), 1, model::kWidth);
      size_t comma = value.find(',', at);
      if (comma != std::string::npos) at = comma + 1;  // the last one is the rest's, too
    }
  } else if (name == "lanes") {
    config.lanes = number(value, 1, model::kLanes);
  } else if (name == "depth") {
    config.depth = number(value, 1, model::kDepth);
  } else if (name == "passes") {
    config.passes = number(value, 1, 3);
  } else if (name == "faults") {
    config.faults = number(value, 0, 3);
  } else if (name == "limit") {
    config.limit = number(value, 1, model::kQueue);
  } else if (bool* flag = flag_of(config, name)) {
    *flag = number(value, 0, 1) != 0;
  } else {
    throw std::invalid_argument("no such setting: " + name);
  }
}

void print(const model::Found& found) {
  std::printf(
      "{\"states\": %llu, \"steps\": %llu, \"ends\": %llu, \"complete\": %s, "
      "\"seconds\": %.2f, \"broken\": \"%s\", \"trace\": [",
      static_cast<unsigned long long>(found.states), static_cast<unsigned long long>(found.steps),
      static_cast<unsigned long long>(found.ends), found.complete ? "true" : "false", found.seconds,
      found.broken.c_str());
  for (size_t i = 0; i < found.trace.size(); ++i)
    std::printf("%s\"%s\"", i == 0 ? "" : ", ", found.trace[i].c_str());
  std::printf("]}\n");
}

}  // namespace

int main(int argc, char** argv) {
  Config config;
  bool shortest = false;
  uint64_t most = 200000000;
  try {
    for (int i = 1; i < argc; ++i) {
      std::string word = argv[i];
      size_t equals = word.find('=');
      if (word == "--shortest")
        shortest = true;
      else if (word == "--most" && i + 1 < argc)
        most = std::strtoull(argv[++i], nullptr, 10);
      else if (equals != std::string::npos)
        set(config, word.substr(0, equals), word.substr(equals + 1));
      else
        throw std::invalid_argument("no such argument: " + word);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "model: %s\n", error.what());
    return 2;
  }
  print(shortest ? model::shortest(config, most) : model::explore(config, most));
  return 0;
}
