// Lanes whose payload passes a gate before it is in its slot.
#include "mailbox.hpp"

namespace tapchannel {

bool MailboxCore::open_gate(const std::shared_ptr<Mapping>& staging) {
  if (fork_.forked()) return false;
  std::lock_guard once(gate_mutex_);
  std::shared_ptr<Port> port;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return false;
    if (gate_) return true;
    port = port_;
  }
  // Registering gigabytes takes a while: the monitor must not wait for it.
  std::unique_ptr<Passage> passage = port->passage(staging);
  std::vector<Gate::Served> served;
  served.reserve(lanes_.size());
  for (auto& lane : lanes_) served.push_back({&lane.block, &lane.cells});
  std::lock_guard lock(mutex_);
  if (closed_) return false;
  gate_ = std::make_unique<Gate>(std::move(passage), served, slot_bytes_);
  tell_gate();
  return true;
}

int MailboxCore::arrivals_fd(size_t lane, const std::string& name) {
  if (fork_.forked()) return -1;
  std::lock_guard lock(mutex_);
  if (closed_ || !gate_) return -1;
  return fcntl(gate_->arrivals(lane, name).fd(), F_DUPFD_CLOEXEC, 3);
}

// What has credit, whenever that changes: the gate looks at nothing else.
void MailboxCore::tell_gate() {
  if (gate_) gate_->credit(open_ ? make_stamp(epoch_, step_, granted_) : 0);
}

void MailboxCore::leave_gate() {
  if (!gate_) return;
  gate_->leave_to_parent();
  static_cast<void>(gate_.release());
}

// Whether a stream may be made to wait for the cell's stamp. For that all that the stamp needs must
// have been enqueued: a wait made before the gate's own copy could hold it up for ever (I6), by
// sharing its connection, or because the driver stays stuck behind the wait.
bool MailboxCore::passed(size_t index, size_t cell, size_t slot, uint64_t key) const {
  return !lanes_[index].staged || gate_->passed(index, slot, cell, key);
}

// A tap that has arrived will land, whatever became of its lane meanwhile.
bool MailboxCore::underway(size_t index, size_t cell, size_t slot, uint64_t key) const {
  return lanes_[index].staged && gate_->underway(index, slot, cell, key);
}

// Why the gate will never let this cell's tap through, if so.
Verdict MailboxCore::gate_fault(size_t index, size_t cell, size_t slot, uint64_t key) {
  const Lane& lane = lanes_[index];
  if (!lane.staged) return {};
  Verdict bad;
  bad.reason = gate_->failure();
  AnnounceFacts said = read_announce(lane.block, lane.cells[cell], cell, slot, key);
  if (!bad.reason.empty()) {
    bad.fault = Fault::device_error;
  } else if (said.present && !said.fits) {
    bad.fault = Fault::bad_announce;
    bad.seen = said.rows;
    bad.expected = lane.cells[cell].row_limit;
  }
  bad.key = key;
  bad.lane = static_cast<int>(index);
  return bad;
}

}  // namespace tapchannel
