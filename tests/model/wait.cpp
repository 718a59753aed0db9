// Waits and reads: what a key still lacks, the consumer's stream, the monitor.
#include "rules.hpp"

namespace model {

namespace {
constexpr const char* kPatterns[] = {"poison pattern is in slot 0", "poison pattern is in slot 1",
                                     "poison pattern is in slot 2"};
}

bool Rules::given_up(const State& state, Word key) const {
  for (int i = 0; i < config_.lanes; ++i) {
    const Lane& lane = state.lane[i];
    uint8_t words = config_.wire == Wire::ucx ? lane.gave_up_heard : lane.gave_up;
    if (lane.ever && (words & bit(pass_of(key)))) return true;
  }
  return false;
}

bool Rules::all_landed(const State& state, Word key) const {
  for (int i = 0; i < config_.lanes; ++i)
    if (!reached(state.lane[i].cell[slot_of(key)].stamp, word(key))) return false;
  return true;
}

bool Rules::all_arrived(const State& state, Word key) const {
  for (int i = 0; i < config_.lanes; ++i)
    if (key_of(state.lane[i].cell[slot_of(key)].said) != word(key)) return false;
  return all_landed(state, key);
}

// MailboxCore::unmet: a fault of any lane comes before a wait for another.
Rules::Want Rules::unmet(const State& state, Word key, bool stamps, bool announces) const {
  Want want = Want::nothing;
  for (int i = 0; i < config_.lanes; ++i) {
    const Lane& lane = state.lane[i];
    const Cell& cell = lane.cell[slot_of(key)];
    bool here = reached(cell.stamp, word(key));
    if (here && cell.stamp != word(key)) return Want::fault;  // overrun
    bool passed = !staged(lane) || cell.passed == key || bug(Bug::wait_unpassed);
    bool said = key_of(cell.said) == word(key);
    bool must_say = announces || stamps || (config_.shared && i == 0);
    if ((here || (!stamps && passed)) && (said || !must_say)) continue;
    bool underway = staged(lane) && (cell.passed == key || (cell.arrival == key && said));
    bool fault = lane.lost || (lane.barred && pass_of(lane.barred) == pass_of(key)) ||
                 (lane.ever && !lane.attached);
    if (fault && !underway) return Want::fault;
    want = Want::more;
  }
  return want;
}

// I1: whoever reads the key's slot with a good lease must see what was pushed for it, all of it.
const char* Rules::misread(const State& state, Word key, bool flags) const {
  for (int i = 0; i < config_.lanes; ++i) {
    const Cell& cell = state.lane[i].cell[slot_of(key)];
    for (Word half : cell.half)
      if (key_of(half) != key || half == kPattern || (flags && (half ^ cell.said) & kDropped))
        return "I1";
  }
  return nullptr;
}

// I2: nobody writes a slot that may be read now. A wait that poison let through and that has not
// been judged yet may still be found to have failed.
const char* Rules::overwrite(State& state, int slot) const {
  Consumer& mine = state.consumer;
  for (int i = 0; i < mine.leases; ++i) {
    Lease& lease = mine.lease[i];
    if (slot_of(lease.key) != slot || lease.failed || lease.performed) continue;
    bool ahead = false;
    for (int op = 0; op < mine.ops; ++op)
      ahead |= mine.op[op].op == Op::wait && mine.op[op].key == lease.key;
    if (ahead) continue;
    if (!lease.waiting) return "I2";
    lease.wrong = 1;
  }
  return nullptr;
}

// Performs the stream's next operation. A read that no longer has to wait may as well be performed
// at once: what it sees cannot change unseen, since nobody may write the slot until it is given
// back.
const char* Rules::perform(State& state) const {
  Consumer& mine = state.consumer;
  StreamOp op = mine.op[0];
  for (int i = 1; i < mine.ops; ++i) mine.op[i - 1] = mine.op[i];
  mine.op[--mine.ops] = StreamOp{};
  if (config_.shared)
    for (auto& lane : state.lane)
      for (auto& cell : lane.cell)
        for (Puts* puts : {&cell.puts, &cell.carried})
          for (uint8_t& behind : puts->behind) behind -= behind != 0;
  const char* broken = nullptr;
  for (int i = 0; i < mine.leases; ++i) {
    Lease& lease = mine.lease[i];
    if (lease.key != op.key) continue;
    if (op.op == Op::release) lease.performed = 1;
    if (op.op != Op::read || !misread(state, op.key, false)) continue;
    if (lease.waiting || lease.failed)
      lease.wrong = 1;  // no harm if the wait is found to have failed
    else
      broken = "I1";
  }
  return broken;
}

const char* Rules::read_on(State& state) const {
  const Consumer& mine = state.consumer;
  const char* broken = nullptr;
  while (!config_.fine && mine.ops != 0 && mine.op[0].op == Op::read && broken == nullptr)
    broken = perform(state);
  return broken;
}

// The consumer's stream, one operation after the other.
void Rules::stream(const State& from) {
  const Consumer& mine = from.consumer;
  if (mine.ops == 0) return;
  StreamOp op = mine.op[0];
  if (op.op == Op::wait)
    for (int i = 0; i < config_.lanes; ++i)
      if ((op.lanes >> i & 1) && !landed(from.lane[i].cell[slot_of(op.key)].stamp, word(op.key)))
        return;
  State next = from;
  const char* broken = perform(next);
  if (broken == nullptr) broken = read_on(next);
  int number = op.op == Op::wait ? 7 : op.op == Op::read ? 8 : 9;
  const char* text = op.op == Op::wait   ? (config_.fine ? "stream has waited for" : "stream reads")
                     : op.op == Op::read ? "stream reads"
                                         : "stream has performed the release of";
  emit(next, number, -1, text, op.key, broken);
}

void Rules::monitor(const State& from) {
  const Consumer& mine = from.consumer;
  for (int slot = 0; slot < config_.depth; ++slot) {
    if (mine.fill[slot] == 0) continue;
    State next = from;
    const char* broken = overwrite(next, slot);
    for (int i = 0; i < config_.lanes; ++i)
      if (mine.fill[slot] >> i & 1)
        for (Word& half : next.lane[i].cell[slot].half) half = kPattern;
    next.consumer.fill[slot] = 0;
    emit(next, 0, -1, kPatterns[slot], 0, broken);
  }
  for (int i = 0; i < mine.leases; ++i) {
    const Lease& lease = mine.lease[i];
    State next = from;
    if (lease.performed && (mine.fill[slot_of(lease.key)] == 0 || bug(Bug::pattern_late))) {
      bool wrong = lease.wrong && !lease.failed && !mine.failed;
      erase(next, i);
      emit(next, 1, -1, "sees released", lease.key, wrong ? "I1" : nullptr);
      continue;
    }
    if (lease.doomed && may_poison(from, i)) {
      poison(next, next.consumer.lease[i]);
      emit(next, 7, -1, "poisons the wait for", lease.key);
      next = from;
    }
    bool again = lease.failed && !lease.doomed && !lease.performed && !bug(Bug::poison_once);
    if (again && poison_words(next, lease))
      emit(next, 7, -1, "puts the poison back for", lease.key);
    next = from;
    if (lease.failed && bug(Bug::poison_forgotten) && all_arrived(from, lease.key)) {
      next.consumer.lease[i].failed = 0;
      emit(next, 7, -1, "forgives", lease.key, lease.wrong ? "I1" : nullptr);
      continue;
    }
    if (!lease.waiting) continue;
    if (all_arrived(from, lease.key)) {
      next.consumer.lease[i].waiting = 0;
      emit(next, 7, -1, "sees landed", lease.key,
           lease.wrong || misread(from, lease.key, true) ? "I1" : nullptr);
      continue;
    }
    bool fault = given_up(from, lease.key) || unmet(from, lease.key, true, true) == Want::fault;
    if (!fault && !spend(next)) continue;
    fail(next, i);
    next.consumer.failed = 1;
    emit(next, 7, -1, fault ? "fails the wait for" : "times out on the wait for", lease.key);
  }
}

}  // namespace model
