// Payloads and stamps on their way: a lane's puts, those of a dead process, the gate's copies.
#include "rules.hpp"

namespace model {

namespace {
constexpr uint8_t kHalves = 3, kSaid = 4, kStamped = 8;  // parts of a put
}

// What is enqueued now, with one connection, stands behind the last wait of the stream.
uint8_t Rules::behind(const State& state) const {
  const Consumer& mine = state.consumer;
  for (int i = mine.ops; i > 0; --i)
    if (mine.op[i - 1].op == Op::wait) return static_cast<uint8_t>(i);
  return 0;
}

void Rules::puts(const State& from, int index, int slot, Whose whose) {
  auto of = [whose](Cell& cell) -> Puts& {
    return whose == Whose::lane ? cell.puts : whose == Whose::ghost ? cell.ghosts : cell.carried;
  };
  State next = from;
  Cell& cell = next.lane[index].cell[slot];
  Puts& mine = of(cell);
  if (mine.count == 0 || mine.behind[0] != 0) return;
  const Word put = mine.key[0], said = bug(Bug::drop_unmarked) ? key_of(put) : put;
  const uint8_t done = mine.done;
  const bool gate = whose == Whose::gate, staged = this->staged(from.lane[index]) && !gate;
  const bool network = config_.wire == Wire::ucx;
  const bool announces = network || (config_.wire == Wire::shm && config_.fine);

  auto part = [&](uint8_t bits, int number, const char* text, const char* broken = nullptr) {
    of(next.lane[index].cell[slot]).done |= bits;
    emit(next, number, index, text, put, broken);
    next = from;
  };
  auto stamp = [&] {
    if (staged)
      cell.arrival = key_of(put);
    else
      cell.stamp = word(key_of(put));
    const bool last = !bug(Bug::stamp_early) && (!network || (done & kSaid));
    if (last) mine.pop();
    part(last ? 0 : kStamped, 6,
         gate     ? "gate stamps"
         : staged ? "tells of the arrival of"
                  : "stamps");
  };
  auto announce = [&] {
    cell.said = word(said);
    const bool last = (done & kStamped) != 0;
    if (last) mine.pop();
    part(last ? 0 : kSaid, 2, "announces");
  };
  auto halves = [&](uint8_t bits) {
    for (int half = 0; half < 2; ++half) {
      if (!(bits >> half & 1)) continue;
      if (staged)
        cell.staged[half] = put;
      else
        cell.half[half] = gate ? cell.staged[half] : put;
    }
    const char* broken = staged ? nullptr : overwrite(next, slot);
    bool last = bug(Bug::stamp_early) && ((done | bits) & kHalves) == kHalves;
    if (last) mine.pop();
    part(last ? 0 : bits, 5,
         gate              ? "gate copies"
         : bits == kHalves ? "has put"
         : bits == 1       ? "has put one half of"
                           : "has put the other half of",
         broken);
  };

  auto all = [&] {
    cell.said = network ? word(said) : cell.said;
    for (int half = 0; half < 2; ++half)
      (staged ? cell.staged : cell.half)[half] = gate ? cell.staged[half] : put;
    (staged ? cell.arrival : cell.stamp) = staged ? key_of(put) : word(key_of(put));
    mine.pop();
    const char* broken = staged ? nullptr : overwrite(next, slot);
    part(0, 6, gate ? "gate copies and stamps" : "has put and stamped", broken);
  };

  if (config_.whole) return all();
  if (bug(Bug::stamp_early) && !(done & kStamped)) return stamp();
  if (!network && announces && !(done & kSaid)) return announce();
  if ((done & kHalves) != kHalves) {
    if (!config_.fine) return halves(kHalves);
    if (!(done & 1)) halves(1);
    if (!(done & 2) && (network || (done & 1))) halves(2);
    return;
  }
  if (network && !(done & kSaid)) announce();
  if (!(done & kStamped)) stamp();
}

// The gate acts on credit: a slot's newest granted key is the only one that it looks for.
void Rules::gate(const State& from, int index) {
  Word granted = from.consumer.gate;
  int count = count_of(granted), least = count - config_.depth;
  for (int i = count; i > 0 && i > least; --i) {
    Word key = make_word(epoch_of(granted), pass_of(granted) & 3, i);
    const Cell& cell = from.lane[index].cell[slot_of(key)];
    if (cell.passed == key || cell.arrival != key || key_of(cell.said) != word(key)) continue;
    State next = from;
    Cell& made = next.lane[index].cell[slot_of(key)];
    made.passed = key;
    made.carried.push(key, config_.shared ? behind(from) : 0);
    emit(next, 5, index, "gate lets through", key);
  }
}

bool Rules::fenced(const State& state, int index) const {
  if (config_.wire != Wire::staged) return true;
  Word granted = state.consumer.gate;
  for (int slot = 0; slot < config_.depth; ++slot) {
    const Cell& cell = state.lane[index].cell[slot];
    if (cell.carried.count) return false;
    int count = count_of(cell.arrival);
    bool due = cell.arrival && pass_of(cell.arrival) == pass_of(granted) &&
               count <= count_of(granted) && count > count_of(granted) - config_.depth &&
               cell.passed != cell.arrival && key_of(cell.said) == word(cell.arrival);
    if (due) return false;
  }
  return true;
}

const char* Rules::successors(const State& from, std::vector<Successor>& to) {
  out_ = &to;
  to.clear();
  all(from);
  for (const Successor& step : to)
    if (!step.action.fault) return nullptr;
  return unfinished(from);
}

void Rules::all(const State& from) {
  consumer(from);
  stream(from);
  monitor(from);
  for (int i = 0; i < config_.lanes; ++i) {
    lane(from, i);
    for (int slot = 0; slot < config_.depth; ++slot) {
      puts(from, i, slot, Whose::lane);
      puts(from, i, slot, Whose::ghost);
      puts(from, i, slot, Whose::gate);
    }
    if (config_.wire == Wire::staged) gate(from, i);
  }
}

const char* Rules::unfinished(const State& state) const {
  const Consumer& mine = state.consumer;
  if (mine.open || mine.left || mine.leases || mine.ops || mine.failed)
    return "I3: the consumer waits for ever";
  for (int i = 0; i < config_.lanes; ++i)
    if (state.lane[i].open || state.lane[i].queued) return "I3: a producer waits for ever";
  return nullptr;
}

}  // namespace model
