// What becomes of a lease: poison, streams that read it, its way back (step 9).
#include "mailbox.hpp"

namespace tapchannel {

namespace {
constexpr double kFillPatience = 0.5;  // seconds that a poisoned wait goes on for its pattern, and
constexpr double kFillRate = 5e9;  // bytes a second that the pattern is expected to make at least
}  // namespace

// First the pattern, then the word that lets the stream go on (I4). Where the driver itself is
// stuck behind the stream the pattern cannot be written in time: the wait must end all the same
// (I3), the lease raises, and the slot is not granted anew before the late pattern has been
// performed.
void MailboxCore::poison(LeaseRecord& record) {
  std::vector<Region> regions;
  std::vector<std::pair<size_t, size_t>> cells;
  uint64_t bytes = 0;
  for (size_t i = 0; i < lanes_.size(); ++i)
    for (size_t cell = 0; cell < lanes_[i].cells.size(); ++cell) {
      const auto& stamp = lanes_[i].block.stamp(record.slot, cell);
      if (reached(stamp.load(std::memory_order_acquire), record.key)) continue;
      const auto& geometry = lanes_[i].cells[cell];
      uint64_t offset = record.slot * slot_bytes_ + geometry.offset;
      regions.push_back({offset, geometry.tap_rows, geometry});
      bytes += geometry.tap_rows * geometry.row_bytes;
      cells.emplace_back(i, cell);
    }
  record.fill = port_->start_fill(std::move(regions));
  Patience patience(kFillPatience + static_cast<double>(bytes) / kFillRate);
  while (!port_->filled(record.fill) && !patience.over()) {
    sleep_ns(20000);
    patience.tick();
  }
  for (auto [lane, cell] : cells) {
    auto& word = lanes_[lane].block.stamp(record.slot, cell);
    uint64_t seen = word.load(std::memory_order_acquire);
    while (!landed(seen, record.key) &&
           !word.compare_exchange_weak(seen, record.key | kPoison, std::memory_order_acq_rel)) {
    }
    tapchannel::record(lanes_[lane].block.consumer_ring(), Step::poison, record.key, cell, 0);
  }
  record.waiting = false;
}

void MailboxCore::fail(LeaseRecord& record, Verdict verdict) {
  record.failure = verdict;
  poison(record);
  if (!failure_) failure_ = std::move(verdict);
  ring(credit_bell_);
}

Verdict MailboxCore::check_lease(uint64_t lease) {
  if (fork_.forked()) return Verdict::of(Fault::forked);
  std::lock_guard lock(mutex_);
  auto found = leases_.find(lease);
  return found == leases_.end() ? Verdict{} : found->second.failure;
}

bool MailboxCore::record_stream(uint64_t lease, uintptr_t stream) {
  if (fork_.forked()) return false;
  std::lock_guard lock(mutex_);
  auto found = leases_.find(lease);
  if (found == leases_.end() || found->second.hold != Hold::held) return false;
  auto& streams = found->second.streams;
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
  return true;
}

size_t MailboxCore::take_word() {
  if (free_words_.empty()) return words_used_++;
  size_t word = free_words_.back();
  free_words_.pop_back();
  return word;
}

void MailboxCore::drop(uint64_t lease) noexcept {
  if (fork_.forked()) return;
  std::lock_guard lock(mutex_);
  auto found = leases_.find(lease);
  if (found == leases_.end() || found->second.hold != Hold::held) return;
  found->second.hold = Hold::dropped;
  give_back(lease, found->second);
  if (closed_ && leases_.empty()) port_.reset();
}

// Step 9. On a GPU the credit follows when the word behind the reads has been written; the monitor
// sees it.
void MailboxCore::give_back(uint64_t id, LeaseRecord& record) {
  Given given = port_->release(record.streams, record.word, id, record.slot * slot_bytes_,
                               fill_released_ ? slot_bytes_ : 0);
  if (given == Given::refused) return;  // the monitor tries again
  for (auto& lane : lanes_)
    tapchannel::record(lane.block.consumer_ring(), Step::release, record.key, 0, 0);
  record.hold = Hold::releasing;
  if (given == Given::performed) {
    if (open_ && record.pass == pass()) received_[record.microbatch] = Received::released;
    free_words_.push_back(record.word);
    leases_.erase(id);
    advance();
  }
  if (given != Given::performed) ring(bell_);
}

}  // namespace tapchannel
