// The lanes as the consumer sees them: attach, fence, watch.
#include <poll.h>
#include <sys/socket.h>

#include "mailbox.hpp"
#include "socket_end.hpp"

namespace tapchannel {

namespace {
constexpr uint64_t kSettleLimit = 1000000000ULL;  // for a peer to hear of the close

// No copy of the peer's is in flight any more.
bool said_closed(const ControlBlock& block) {
  return block.producer().state.value.load(std::memory_order_acquire) ==
         static_cast<uint64_t>(LaneState::closed);
}

// An outbox says that it is attached before it puts anything. One whose deadline passed while
// "live" was on its way never does; its process may live long, and come again at once.
bool never_began(const ControlBlock& block) {
  return block.producer().state.value.load(std::memory_order_acquire) ==
         static_cast<uint64_t>(LaneState::empty);
}

bool readable(int fd, short what) {
  pollfd one{fd, what, 0};
  return fd >= 0 && poll(&one, 1, 0) == 1;
}

}  // namespace

void MailboxCore::store_lane_words(Lane& lane) {
  auto& words = lane.block.consumer();
  bool barred = open_ && lane.barred_pass == pass();
  words.epoch.value.store(epoch_, std::memory_order_release);
  if (barred) {
    write_text(words.reason, "the lane restarted in the middle of the pass");
    words.aborted.value.store(make_stamp(epoch_, step_, 0), std::memory_order_release);
  }
  words.credit.value.store(open_ && !barred ? make_stamp(epoch_, step_, granted_) : 0,
                           std::memory_order_release);
  words.open_pass.value.store(open_ ? make_stamp(epoch_, step_, microbatches_) : 0,
                              std::memory_order_release);
  tell(lane);
}

void MailboxCore::tell(Lane& lane) {
  ring(lane.block.consumer().bell);
  if (lane.link) lane.link->kick();
}

MailboxCore::Admission MailboxCore::may_attach(size_t index) {
  if (fork_.forked()) return Admission::closed;
  std::unique_lock lock(mutex_);
  if (closed_) return Admission::closed;
  Lane& lane = lanes_.at(index);
  if (lane.revoked) return Admission::revoked;
  watch_lane(lane);
  if (lane.attached) return Admission::taken;
  if (std::shared_ptr<LaneLink> last = std::exchange(lane.link, nullptr)) {
    lock.unlock();  // it may take its time
    last->end();
    lock.lock();
    lane.clean = true;  // that was the fence
  }
  // What the gate still carries of the lane's last life must not land over the next one's taps.
  if (gate_ && !gate_->fence(index)) return Admission::not_fenced;
  if (!lane.ever || lane.clean || said_closed(lane.block)) return Admission::free;
  // The dead process's copies may still land. Its pidfd turns readable only after its files, the
  // GPU's among them, are closed.
  if (lane.pidfd < 0) return Admission::not_fenced;
  pollfd gone{lane.pidfd, POLLIN, 0};
  return poll(&gone, 1, 0) == 1 ? Admission::free : Admission::not_fenced;
}

MailboxCore::Admission MailboxCore::attach(size_t index, int socket, int pidfd, bool same_process,
                                           bool staged, std::shared_ptr<LaneLink> link) {
  Admission admission = may_attach(index);
  if (admission != Admission::free) return admission;
  std::lock_guard lock(mutex_);
  Lane& lane = lanes_[index];
  if (staged && !gate_) throw std::invalid_argument("the mailbox has no gate");
  if (lane.ever) fail_waits(index);
  if (staged) gate_->begin(index);
  auto& words = lane.block.producer();
  words.open_pass.value.store(
      0, std::memory_order_release);  // fenced: nobody else writes these words now
  for (auto& aborted : words.aborted) aborted.value.store(0, std::memory_order_release);
  words.state.value.store(static_cast<uint64_t>(LaneState::empty), std::memory_order_release);
  if (open_ && lane.ever && lane.attached_in_pass == pass()) lane.barred_pass = pass();
  if (open_) lane.attached_in_pass = pass();
  if (lane.pidfd >= 0) ::close(lane.pidfd);
  // A pass that was closed before its first life came is still owed to it.
  if (lane.ever) lane.block.consumer().completed.value.store(0, std::memory_order_release);
  lane.socket = socket;
  lane.pidfd = pidfd;
  lane.attached = lane.ever = true;
  lane.lost = lane.clean = false;
  lane.same_process = same_process;
  lane.staged = staged;
  ++lane.attaches;
  lane.why.clear();
  ForkGuard::close_in_child(socket);
  lane.link = std::move(link);
  if (lane.link) lane.link->begin(lane.block, socket);
  store_lane_words(lane);
  record(lane.block.consumer_ring(), Step::attach, 0, 0, 0);
  ring(bell_);
  return Admission::free;
}

// The peer never heard "live": it has put nothing, and needs no fence.
void MailboxCore::undo_attach(size_t index) {
  if (fork_.forked()) return;
  std::lock_guard lock(mutex_);
  Lane& lane = lanes_.at(index);
  if (!lane.attached) return;
  lane.clean = true;
  if (lane.link) std::exchange(lane.link, nullptr)->end();
  detach(lane);
  record(lane.block.consumer_ring(), Step::close, 0, 0, 0);
}

void MailboxCore::detach(Lane& lane) {
  lane.attached = false;
  ForkGuard::forget(lane.socket);
  ::close(lane.socket);
  lane.socket = -1;
}

void MailboxCore::revoke(size_t index, const std::string& reason) {
  if (fork_.forked()) return;
  std::unique_lock lock(mutex_);
  Lane& lane = lanes_.at(index);
  if (closed_ || lane.revoked) return;
  lane.revoked = true;
  lane.why = reason;
  auto& words = lane.block.consumer();
  write_text(words.reason, reason);
  words.credit.value.store(0, std::memory_order_release);
  words.state.value.store(static_cast<uint64_t>(LaneState::revoked), std::memory_order_release);
  tell(lane);
  ring(lane.block.producer().bell);  // a recv of ours may sleep on it
  if (std::shared_ptr<LaneLink> link = lane.link) {
    lock.unlock();  // it may take its time
    static_cast<void>(link->settle(kSettleLimit));
    lock.lock();
    if (lane.attached) shutdown(lane.socket, SHUT_RDWR);
    lock.unlock();
    link->end();  // the fence: from here on nothing of the peer's lands
    lock.lock();
  }
  if (lane.attached) detach(lane);
  record(lane.block.consumer_ring(), Step::close, 0, 0, 0);
}

bool MailboxCore::carried(uint64_t limit_ns) {
  std::vector<std::shared_ptr<LaneLink>> links;
  {
    std::lock_guard lock(mutex_);
    for (const Lane& lane : lanes_)
      if (lane.attached && lane.link) links.push_back(lane.link);
  }
  return std::all_of(links.begin(), links.end(),
                     [limit_ns](const auto& link) { return link->settle(limit_ns); });
}

void MailboxCore::end_lanes() {
  for (auto& lane : lanes_)
    if (lane.link) {
      static_cast<void>(lane.link->settle(kSettleLimit));  // the peer is to hear of the close
      shutdown(lane.socket, SHUT_RDWR);                    // and to put nothing into what ends now
      lane.link->end();
    }
  for (auto& lane : lanes_)
    for (int* fd : {&lane.socket, &lane.pidfd}) {
      if (*fd < 0) continue;
      ForkGuard::forget(*fd);
      ::close(*fd);
      *fd = -1;
    }
}

LaneStatus MailboxCore::lane_status(size_t index) {
  if (fork_.forked()) return {};
  std::lock_guard lock(mutex_);
  Lane& lane = lanes_.at(index);
  if (!closed_) watch_lane(lane);
  uint64_t beat = lane.block.producer().heartbeat.value.load(std::memory_order_acquire);
  return {lane.attached, lane.lost,    lane.revoked,
          lane.ever,     beat != 0,    beat == 0 ? -1 : static_cast<double>(now_ns() - beat) / 1e9,
          lane.attaches, lane.counters};
}

void MailboxCore::watch_lane(Lane& lane) {
  if (!lane.attached) return;
  if (!said_closed(lane.block) && !socket_ended(lane.socket) && !readable(lane.pidfd, POLLIN))
    return;
  // Looked at again: an orderly close stores its state before it closes the socket.
  lane.clean = said_closed(lane.block) || (!lane.link && never_began(lane.block));
  lane.lost = !lane.clean;
  if (lane.lost && lane.link && !lane.revoked) lane.why = lane.link->failure();
  detach(lane);
  record(lane.block.consumer_ring(), lane.lost ? Step::lost : Step::close, 0, 0, 0);
}

}  // namespace tapchannel
