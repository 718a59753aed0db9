// Announces as the consumer reads them: copied, checked, and compared with what recv named.
#include "announce.hpp"
#include "mailbox.hpp"

namespace tapchannel {

namespace {
// Read once: the compiler may otherwise fetch a word a second time after it was checked, and the
// peer may have changed it.
template <class T>
T once(const T& word) {
  return *static_cast<const volatile T*>(&word);
}
}  // namespace

AnnounceFacts read_announce(const ControlBlock& block, const CellGeometry& geometry, size_t cell,
                            size_t slot, uint64_t key) {
  const Announce& said = block.announce(slot, cell);
  AnnounceFacts facts;
  facts.present = said.key.load(std::memory_order_acquire) == key;
  facts.rows = once(said.rows);
  facts.row_begin = once(said.row_begin);
  facts.dtype = once(said.dtype);
  facts.flags = once(said.flags);
  facts.checksum = once(said.checksum);
  uint32_t ndim = once(said.ndim);
  if (ndim >= 1 && ndim <= kMaxDims)
    for (uint32_t i = 0; i < ndim; ++i) facts.shape.push_back(once(said.shape[i]));
  facts.present = facts.present && said.key.load(std::memory_order_acquire) == key;

  uint64_t rows = 1;  // what the shape comes to, its last dimension left out
  for (size_t i = 0; i + 1 < facts.shape.size(); ++i) {
    if (facts.shape[i] != 0 && rows > geometry.row_limit) break;
    rows = facts.shape[i] > geometry.row_limit ? geometry.row_limit + 1 : rows * facts.shape[i];
  }
  facts.fits = facts.rows <= geometry.row_limit && facts.row_begin <= geometry.tap_rows &&
               facts.rows <= geometry.tap_rows - facts.row_begin && facts.dtype == geometry.dtype &&
               !facts.shape.empty() && facts.shape.back() == geometry.width && rows == facts.rows;
  return facts;
}

Verdict MailboxCore::bad_announce(const Lane& lane, size_t index, size_t slot, uint64_t key) {
  for (size_t cell = 0; cell < lane.cells.size(); ++cell) {
    AnnounceFacts facts = read_announce(lane.block, lane.cells[cell], cell, slot, key);
    if (facts.fits) continue;
    Verdict bad = Verdict::of(Fault::bad_announce, key, static_cast<int>(cell));
    bad.lane = static_cast<int>(index);
    bad.seen = facts.rows;
    bad.expected = lane.cells[cell].row_limit;
    return bad;
  }
  return {};
}

// A view sized by the caller's own number must not show rows that nobody pushed for this key (I1).
Verdict MailboxCore::rows_fault(uint64_t key, size_t slot, int64_t rows) const {
  if (rows < 0) return {};
  std::map<uint32_t, std::pair<uint64_t, Verdict>> sums;
  for (size_t i = 0; i < lanes_.size(); ++i)
    for (size_t cell = 0; cell < lanes_[i].cells.size(); ++cell) {
      const auto& announce = lanes_[i].block.announce(slot, cell);
      if (!lanes_[i].cells[cell].counts_rows || announce.key.load(std::memory_order_acquire) != key)
        continue;
      auto& [sum, place] = sums[lanes_[i].cells[cell].tap];
      sum += announce.rows;
      place = Verdict::of(Fault::rows_differ, key, static_cast<int>(cell));
      place.lane = static_cast<int>(i);
    }
  for (auto& [tap, sum] : sums) {
    if (sum.first == static_cast<uint64_t>(rows)) continue;
    sum.second.seen = sum.first;
    sum.second.expected = static_cast<uint64_t>(rows);
    return sum.second;
  }
  return {};
}

// By its own key, not the open pass's: a lease stays readable when the mailbox is reset.
AnnounceFacts MailboxCore::announce(size_t index, size_t cell, uint64_t key) {
  if (fork_.forked()) return {};
  std::lock_guard lock(mutex_);
  const auto& lane = lanes_.at(index);
  if (cell >= lane.cells.size() || count_of(key) == 0) return {};
  size_t slot = (count_of(key) - 1) % depth_;
  AnnounceFacts facts = read_announce(lane.block, lane.cells[cell], cell, slot, key);
  facts.present = facts.present && facts.fits;
  return facts;
}

}  // namespace tapchannel
