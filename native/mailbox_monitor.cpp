// The monitor thread: deadlines and poison of stream waits, releases performed on a GPU, the watch
// over the lanes.
#include <sys/prctl.h>

#include "mailbox.hpp"

namespace tapchannel {

namespace {
constexpr uint64_t kTick = 20000000ULL;  // 20 ms: heartbeat and lane watch
constexpr uint64_t kNap = 10000ULL;      // first nap between looks at words that only a GPU writes
constexpr uint64_t kLongestNap = 100000ULL;
}  // namespace

void MailboxCore::watch_leases(std::vector<uint64_t>& released) {
  for (auto& [id, record] : leases_) {
    if (record.hold == Hold::dropped) released.push_back(id);  // refused once: try again
    bool performed = record.hold == Hold::releasing && port_->released(record.word, id);
    if (performed && port_->filled(record.fill)) released.push_back(id);
    if (record.doomed) poison_if_due(id, record);
    if (record.poisoned && !performed) poison_words(record);
    if (!record.waiting) continue;
    if (all_arrived(record.key, record.slot)) {
      record.waiting = false;
      ring(credit_bell_);  // a close may wait for it
      count_landed(record.key, record.slot, record.patience.waited_s());
      for (auto& lane : lanes_)
        tapchannel::record(lane.block.consumer_ring(), Step::read, record.key, 0, 0);
      if (Verdict bad = rows_fault(record.key, record.slot, record.rows))
        fail(id, record, std::move(bad));
      continue;
    }
    record.patience.tick();
    RecvRequest request;
    request.microbatch = record.microbatch;
    request.need_announces = true;
    Verdict want = given_up(record.key);
    if (!want) want = unmet(request, record.key, true);
    if (!want) continue;
    if (want.fault == Fault::would_block && record.patience.over())
      want = late(want, record.patience);
    if (want.fault != Fault::would_block) fail(id, record, std::move(want));
  }
}

// `awaited`: the words, of what is pending, that a GPU will write.
MailboxCore::Ticked MailboxCore::tick(bool watch, std::vector<ReleaseWord>& awaited) {
  std::lock_guard lock(mutex_);
  for (auto& lane : lanes_) {
    if (!watch) break;
    watch_lane(lane);
    lane.block.consumer().heartbeat.value.store(now_ns(), std::memory_order_release);
  }
  std::vector<uint64_t> released;
  watch_leases(released);
  for (uint64_t id : released) {
    LeaseRecord& record = leases_.at(id);
    if (record.hold == Hold::dropped) {
      give_back(id, record);
      continue;
    }
    if (open_ && record.pass == pass()) received_[record.microbatch] = Received::released;
    free_words_.push_back(record.word);
    leases_.erase(id);
  }
  if (!released.empty()) advance();
  Ticked ticked{false, !released.empty()};
  awaited.clear();
  for (const auto& [id, record] : leases_) {
    ticked.pending |= record.hold != Hold::held || record.waiting || record.doomed;
    if (record.hold == Hold::releasing && port_->filled(record.fill))
      awaited.push_back({record.word, id});
  }
  return ticked;
}

// `port`: port_, which may go while the words are looked at without the lock.
void MailboxCore::monitor(const std::shared_ptr<Port>& port) {
  port->enter_thread();
  prctl(PR_SET_TIMERSLACK, 1000UL);  // this thread's naps: the usual 50 us are five of them
  std::vector<ReleaseWord> awaited;
  uint64_t nap = kNap, watched_at = 0;
  while (!stop_.load(std::memory_order_acquire)) {
    uint32_t before = bell_.count.load(std::memory_order_seq_cst);
    bool watch = now_ns() - watched_at > kTick / 2;
    if (watch) watched_at = now_ns();
    Ticked ticked = tick(watch, awaited);
    if (ticked.released) nap = kNap;
    auto rung = [&] {
      return stop_.load(std::memory_order_acquire) ||
             bell_.count.load(std::memory_order_seq_cst) != before;
    };
    auto released = [&](const ReleaseWord& word) { return port->released(word.word, word.lease); };
    auto met = [&] { return rung() || std::any_of(awaited.begin(), awaited.end(), released); };
    if (!ticked.pending) {
      nap = kNap;
      sleep_on(bell_, kTick, rung);
    } else if (nap == kNap && !awaited.empty() && met_awake(kAwake, met)) {
      continue;  // a credit that is not held up for a nap
    } else {
      sleep_ns(nap);
      nap = std::min(nap * 2, kLongestNap);
    }
  }
}

}  // namespace tapchannel
