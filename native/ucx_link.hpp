// ucx: one lane between hosts. Each side keeps a control block; what one side writes is put into
// the other's.
//
// Ordering rule: payload puts; the end of each of them and of a flush, which together say that they
// are performed at the target; then the puts of the stamp and of the announce's key. Either alone
// says less: a put's end over a network, a flush over cuda_ipc. A fence orders, but UCX's blocks.
// Two puts that both stand behind the flush have no order between them, so the consumer awaits both
// words.
#pragma once

#include <vector>

#include "lane_link.hpp"
#include "transport.hpp"
#include "ucx_endpoint.hpp"

namespace tapchannel::ucx {

enum class Side { consumer, producer };

class Link final : public LaneLink, private Endpoint {
 public:
  // `own`: the registration of this side's control block, which the peer writes.
  Link(std::shared_ptr<Context> context, Side side, std::shared_ptr<Memory> own, double limit_s);
  ~Link() override;
  using Endpoint::address;
  using Endpoint::connect;
  using Endpoint::measure;
  using Endpoint::Regions;
  using Endpoint::transports;
  using Endpoint::write;

  void begin(ControlBlock& block, int socket) override;
  void kick() override { Endpoint::kick(); }
  bool settle(uint64_t limit_ns) override;
  void end() noexcept override;
  std::string failure() const override { return Endpoint::failure(); }
  bool rings() const override { return !one_sided(); }

  // Step 5, for the producer: puts `rows` rows; returns once UCX has them all under way. The source
  // must stay unchanged until performed() counts the stamp behind it, or is what `keep` owns.
  // Blocks:     while too many operations are under way, until the link fails at most.
  void put_rows(const Source& source, const Place& to, const CellGeometry& cell,
                const std::shared_ptr<void>& keep);
  // Step 6: announce and stamp of a cell, behind the flush of all that was put before. Returns the
  // stamp's number.
  uint64_t stamp(const Mark& mark);
  // Waits until performed() has reached a number, or the link has failed.
  void await(uint64_t number);
  // How many stamps have had their payload performed at the consumer.
  uint64_t performed() const { return performed_.load(std::memory_order_acquire); }

 private:
  struct Carried;
  struct Message;
  void look() override;
  void arrived() override;
  void name_words();
  void carry();
  void carry_reason(uint64_t aborts);
  void beat();
  void note_peer();
  bool clean() const;
  void wait_for_room(std::unique_lock<std::mutex>& lock);

  Side side_;
  std::shared_ptr<Memory> own_;
  ControlBlock* block_ = nullptr;  // the core's; with mutex_ held, or once live_
  std::atomic<bool> live_{false};
  std::vector<Carried> words_;
  bool carrying_ = false;
  uint64_t explained_ = 0;  // the aborted words whose reason has been carried
  uint64_t beats_ = 0, beaten_at_ = 0, seen_beat_ = 0;
  uint64_t stamped_ = 0;
  std::atomic<uint64_t> performed_{0};
};

}  // namespace tapchannel::ucx
