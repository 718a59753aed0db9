#include "explore.hpp"

#include <algorithm>
#include <chrono>

namespace model {

namespace {

// 126 bits of a state: with 10^8 states two share them with a chance below 10^-21.
struct Print {
  uint64_t a, b;
};

uint64_t mixed(uint64_t a, uint64_t b) {
  unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

Print print_of(const State& state) {
  constexpr size_t kPairs = (sizeof(State) + 15) / 16;
  uint64_t words[2 * kPairs] = {};
  std::memcpy(words, &state, sizeof(State));
  uint64_t a = 0x9e3779b97f4a7c15ULL, b = 0xc2b2ae3d27d4eb4fULL;
  for (size_t i = 0; i < kPairs; ++i) {
    uint64_t one = words[2 * i], other = words[2 * i + 1];
    a = mixed(a ^ one, other ^ 0xa0761d6478bd642fULL) + i;
    b = mixed(b ^ other, one ^ 0xe7037ed1a0b428dbULL) + (b << 1);
  }
  return {a | 1, mixed(b, 0x8ebc6af09c88c6e3ULL)};  // 0: an empty place
}

class Seen {
 public:
  Seen() : places_(1 << 16) {}
  // The state's place, and whether it is new.
  std::pair<uint64_t*, bool> add(const State& state) {
    if (count_ * 3 > places_.size() * 2) grow();
    Print print = print_of(state);
    Print& place = find(print);
    bool fresh = place.a == 0;
    if (fresh) {
      place = {print.a, print.b & ~1ULL};
      ++count_;
    }
    return {&place.b, fresh};
  }
  uint64_t* find(const State& state) { return &find(print_of(state)).b; }
  uint64_t count() const { return count_; }

 private:
  Print& find(const Print& print) {
    size_t mask = places_.size() - 1, at = (print.a >> 1) & mask;
    while (places_[at].a != 0 && (places_[at].a != print.a || (places_[at].b ^ print.b) > 1))
      at = (at + 1) & mask;
    return places_[at];
  }
  void grow() {
    std::vector<Print> old(places_.size() * 2);
    old.swap(places_);
    for (const Print& print : old)
      if (print.a != 0) find(print) = print;
  }
  std::vector<Print> places_;
  uint64_t count_ = 0;
};

// The lanes are alike, unless one lives in the consumer's process: states that differ in their
// numbers alone are one.
void settle(const Config& config, State& state) {
  if (config.shared || config.lanes < 2) return;
  if (std::memcmp(&state.lane[0], &state.lane[1], sizeof(Lane)) <= 0) return;
  std::swap(state.lane[0], state.lane[1]);
  auto swapped = [](uint8_t mask) { return static_cast<uint8_t>((mask & 1) << 1 | mask >> 1); };
  for (StreamOp& op : state.consumer.op) op.lanes = swapped(op.lanes);
  for (uint8_t& mask : state.consumer.fill) mask = swapped(mask);
}

struct Clock {
  std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }
};

struct Level {  // of a run: its states' steps, and which of them is being followed
  std::vector<Successor> steps;
  size_t next = 0;
};

std::vector<std::string> path(const std::vector<Level>& run, size_t depth) {
  std::vector<std::string> text;
  for (size_t i = 0; i < depth; ++i) text.push_back(to_text(run[i].steps[run[i].next - 1].action));
  return text;
}

}  // namespace

Found explore(const Config& config, uint64_t most_states) {
  Clock clock;
  Found found;
  Rules rules(config);
  Seen seen;
  std::vector<State> states(1, rules.first());
  std::vector<Level> run(1);
  *seen.add(states[0]).first |= 1;  // the mark of the run that is being followed
  static_cast<void>(rules.successors(states[0], run[0].steps));
  for (size_t depth = 1; depth > 0 && found.broken.empty() && seen.count() < most_states;) {
    Level& level = run[depth - 1];
    if (level.next == level.steps.size()) {
      found.ends += level.steps.empty() ? 1 : 0;
      *seen.find(states[depth - 1]) &= ~1ULL;
      --depth;
      continue;
    }
    Successor& step = level.steps[level.next++];
    ++found.steps;
    if (step.action.broken) found.broken = step.action.broken;
    settle(config, step.state);
    auto [mark, fresh] = seen.add(step.state);
    if (!fresh && (*mark & 1)) found.broken = "I3: a run that never ends";
    if (!found.broken.empty()) found.trace = path(run, depth);
    if (!fresh || !found.broken.empty()) continue;
    *mark |= 1;
    if (run.size() == depth) run.emplace_back();
    if (states.size() == depth) states.emplace_back();
    states[depth] = step.state;
    run[depth].next = 0;
    if (const char* why = rules.successors(states[depth], run[depth].steps)) {
      found.broken = why;
      found.trace = path(run, depth);
    }
    ++depth;
  }
  found.states = seen.count();
  found.complete = found.broken.empty() && seen.count() < most_states;
  found.seconds = clock.seconds();
  return found;
}

Found shortest(const Config& config, uint64_t most_states) {
  Clock clock;
  Found found;
  Rules rules(config);
  Seen seen;
  struct Node {
    State state;
    uint32_t parent;
    Action action;
  };
  std::vector<Node> nodes{{rules.first(), 0, {}}};
  seen.add(nodes[0].state);
  std::vector<Successor> steps;
  auto trace = [&](uint32_t at) {
    for (; at != 0; at = nodes[at].parent) found.trace.push_back(to_text(nodes[at].action));
    std::reverse(found.trace.begin(), found.trace.end());
  };
  for (uint32_t at = 0; at < nodes.size() && found.broken.empty() && at < most_states; ++at) {
    if (const char* why = rules.successors(nodes[at].state, steps)) {
      found.broken = why;
      trace(at);
    }
    for (Successor& step : steps) {
      if (!found.broken.empty()) break;
      ++found.steps;
      if (step.action.broken) {
        found.broken = step.action.broken;
        trace(at);
        found.trace.push_back(to_text(step.action));
        break;
      }
      if (seen.add(step.state).second) nodes.push_back({step.state, at, step.action});
    }
  }
  found.states = seen.count();
  found.complete = found.broken.empty() && nodes.size() < most_states;
  found.seconds = clock.seconds();
  return found;
}

std::string to_text(const Action& action) {
  std::string text = action.lane < 0 ? "consumer " : "lane " + std::to_string(action.lane) + " ";
  text += action.text;
  if (pass_of(action.key) != 0) {
    int count = count_of(action.key);
    text += " " + std::to_string(epoch_of(action.key)) + "." +
            std::to_string(pass_of(action.key) & 3) +
            (count ? "." + std::to_string(count - 1) : "");
  }
  return action.number ? "(" + std::to_string(action.number) + ") " + text : text;
}

}  // namespace model
