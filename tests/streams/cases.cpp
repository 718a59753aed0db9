// What the monitor does to waits that stand on a stream, one case a run: streams CASE
#include "cases.hpp"

#include "stream.hpp"

namespace streams {
namespace {

// A dead pass's stamp lands over the poison before the stream has looked at the word.
void poison_sticks() {
  Channel channel(1);
  channel.attach();
  channel.open(5, 1);
  uint64_t key = channel.key(0), lease = channel.received(0);
  channel.core().abort("no more");
  must(channel.core().check_lease(lease).fault == Fault::aborted_here, "the lease has failed");
  must(channel.stamp(0).load() == (key | kPoison), "the word is poisoned");
  channel.stamp(0).store(make_stamp(1, 4, 1));
  must(Channel::until([&] { return channel.port().step(); }), "the stream is let through");
  channel.core().drop(lease);
}

// The older lease is good, and its reads are still queued.
void poison_reaches_no_older_read() {
  Channel channel(1);
  channel.attach();
  channel.open(1, 2);
  channel.put(channel.key(0), 42);
  uint64_t first = channel.received(0);
  channel.core().drop(first);
  uint64_t later = channel.received(1), key = channel.key(1);
  channel.core().abort("no more");
  must(channel.core().check_lease(later).fault == Fault::aborted_here, "the later one has failed");
  must(!Channel::until([&] { return channel.byte(0) != 42; }, 0.2), "no pattern under the reader");
  must(channel.stamp(0).load() == make_stamp(1, 1, 1), "no word either");
  must(channel.port().step(), "the first release is performed");
  must(Channel::until([&] { return channel.port().step(); }), "then the later wait is let through");
  must(channel.stamp(0).load() == (key | kPoison), "by poison");
  must(channel.byte(0) == 0xff, "behind the pattern");
  channel.core().drop(later);
}

// The older lease still waits for its own key, which the poison of the later one would satisfy.
void poison_lets_no_older_wait_through() {
  Channel channel(1);
  channel.attach();
  channel.open(1, 2);
  uint64_t first = channel.received(0);
  channel.core().drop(first);
  auto [verdict, later] = channel.receive(1, 0.05);
  must(!verdict, "the later one is received");
  must(Channel::until([&] { return static_cast<bool>(channel.core().check_lease(later)); }),
       "the later one times out");
  must(!channel.port().step(), "the older one waits on");
  channel.put(channel.key(0), 42);
  must(channel.port().step(), "for its own stamp");
  must(channel.byte(0) == 42, "and its own bytes");
  channel.core().drop(later);
}

// A wait enqueued now would be let through when the poison of an older one is put back.
void nothing_is_enqueued_ahead_of_poison() {
  Channel channel(1);
  channel.attach();
  channel.open(1, 1);
  uint64_t lease = channel.received(0);
  channel.core().drop(lease);
  channel.core().abort("no more");
  channel.stamp(0).store(0);
  channel.open(2, 1);
  size_t before = channel.port().queued();
  must(channel.receive(0, 0.1).first.fault == Fault::credit_timeout, "it waits for the slot");
  must(channel.port().queued() == before, "and nothing was enqueued");
}

// The one word that lets a closed pass keep its credit is about to be the next one's.
void closing_waits_for_the_pass_before() {
  Channel channel(2);
  channel.attach();
  channel.open(1, 2);
  uint64_t awaited = channel.key(1);
  channel.put(channel.key(0), 1);
  for (uint64_t microbatch : {0, 1}) channel.core().drop(channel.received(microbatch));
  must(!channel.core().close_pass(1, nullptr), "the first pass closes");
  must(channel.port().step(), "its first release is performed");
  channel.open(2, 1);
  channel.core().drop(channel.received(0));
  Verdict late = channel.core().close_pass(0.1, nullptr);
  must(late.fault == Fault::announce_timeout && late.key == awaited, "the second waits for it");
  channel.put(awaited, 2);
  must(!channel.core().close_pass(10, nullptr), "and closes once it has landed");
  channel.put(channel.key(0), 3);
}

// A lane whose first life comes after a close is owed the pass's credit.
void late_lane_keeps_the_closed_pass() {
  Channel channel(1);
  channel.open(1, 1);
  channel.core().drop(channel.received(0));
  must(!channel.core().close_pass(1, nullptr), "the pass closes");
  channel.attach();
  const auto& completed = channel.core().block(0).consumer().completed;
  must(completed.value.load() == make_stamp(1, 1, 1), "its credit stands");
  channel.kill();
  channel.attach();
  must(completed.value.load() == 0, "but not for a later life");
}

// Whoever waits for a lane's last life hears of its end, also when the next one is quick.
void restart_does_not_hide_a_loss() {
  Channel channel(1);
  channel.attach();
  channel.open(1, 1);
  uint64_t lease = channel.received(0);
  must(!channel.core().close_pass(1, nullptr), "the pass closes");
  channel.kill();
  channel.attach();
  must(channel.core().check_lease(lease).fault == Fault::peer_lost, "the lease has failed");
  channel.core().drop(lease);
}

// A mailbox that closes leaves no stream waiting.
void closing_the_mailbox_lets_all_through() {
  Channel channel(1);
  channel.attach();
  channel.open(1, 2);
  for (uint64_t microbatch : {0, 1}) channel.core().drop(channel.received(microbatch));
  channel.core().close();
  for (int operations = 0; operations < 4; ++operations)
    must(channel.port().step(), "the stream goes on");
}

const cases::Cases kCases{
    {"poison_sticks", poison_sticks},
    {"poison_reaches_no_older_read", poison_reaches_no_older_read},
    {"poison_lets_no_older_wait_through", poison_lets_no_older_wait_through},
    {"nothing_is_enqueued_ahead_of_poison", nothing_is_enqueued_ahead_of_poison},
    {"closing_waits_for_the_pass_before", closing_waits_for_the_pass_before},
    {"late_lane_keeps_the_closed_pass", late_lane_keeps_the_closed_pass},
    {"restart_does_not_hide_a_loss", restart_does_not_hide_a_loss},
    {"closing_the_mailbox_lets_all_through", closing_the_mailbox_lets_all_through},
};

}  // namespace
}  // namespace streams

int main(int argc, char** argv) { return cases::run(streams::kCases, argc, argv); }
