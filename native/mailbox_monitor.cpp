// The monitor thread: deadlines and poison of stream waits, releases performed on a GPU, the watch
// over the lanes.
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

// Returns true while something is pending that only naps can see.
bool MailboxCore::tick(bool watch) {
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
  for (const auto& [id, record] : leases_)
    if (record.hold != Hold::held || record.waiting || record.doomed) return true;
  return false;
}

void MailboxCore::monitor() {
  port_->enter_thread();
  uint64_t nap = kNap, watched_at = 0;
  while (!stop_.load(std::memory_order_acquire)) {
    uint32_t before = bell_.count.load(std::memory_order_seq_cst);
    bool watch = now_ns() - watched_at > kTick / 2;
    if (watch) watched_at = now_ns();
    bool pending = tick(watch);
    if (pending) {
      sleep_ns(nap);
      nap = std::min(nap * 2, kLongestNap);
    } else {
      nap = kNap;
      sleep_on(bell_, kTick, [&] {
        return stop_.load(std::memory_order_acquire) ||
               bell_.count.load(std::memory_order_seq_cst) != before;
      });
    }
  }
}

}  // namespace tapchannel
