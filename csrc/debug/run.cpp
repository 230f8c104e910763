#include "run.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <iostream>
#include <optional>
#include <vector>

#include "kernels.h"
#include "peer.h"
#include "reference.h"
#include "tensors.h"

namespace flash_dist::debug {

namespace {

// Returns the largest allowed error of a tensor, relative to its greatest magnitude. It leaves room
// for rounding the result, P and dS to the dtype.
double tolerance(const std::string& dtype, const std::string& tensor) {
  if (dtype == "fp32" || dtype == "ieee32" || tensor == "lse") return 1e-4;
  return dtype == "fp16" ? 4e-3 : 3e-2;
}

Inputs to(const Inputs& inputs, at::Device device) {
  return {inputs.q.to(device), inputs.k.to(device), inputs.v.to(device), inputs.dout.to(device)};
}

void print_inputs(const Inputs& inputs) {
  const at::Tensor first = inputs.q.flatten().slice(0, 0, 4).to(at::kDouble);
  std::printf("q[0, 0, 0, :4] = %.6g %.6g %.6g %.6g\n\n", first[0].item<double>(),
              first[1].item<double>(), first[2].item<double>(), first[3].item<double>());
}

constexpr int WARM_UP = 3;

c10::Event record(c10::Stream stream) {
  c10::Event event(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT);  // an event with timing
  event.record(stream);
  return event;
}

void synchronize(c10::Device device) {
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

// Returns the median time in ms of `runs` runs, each between two CUDA events, after WARM_UP warm-up
// runs.
double median_ms(const std::function<void()>& work, int runs, c10::Device device) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  for (int i = 0; i < WARM_UP; ++i) work();
  std::vector<std::pair<c10::Event, c10::Event>> events;
  for (int i = 0; i < runs; ++i) {
    c10::Event begin = record(stream);
    work();
    events.emplace_back(std::move(begin), record(stream));
  }
  synchronize(device);
  std::vector<double> times;
  for (const auto& [begin, end] : events) times.push_back(begin.elapsedTime(end));
  std::nth_element(times.begin(), times.begin() + runs / 2, times.end());
  return times[runs / 2];
}

Outputs run_once(const Options& options, Kernels& kernels) {
  Outputs outputs;
  kernels.forward(outputs);
  if (!options.forward_only) kernels.backward(outputs);
  synchronize(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(options.device)));
  return outputs;
}

bool print_parity(const Options& options, const Outputs& ours, const Outputs& theirs,
                  const Outputs& exact) {
  bool fine = true;
  std::printf("%-6s  %10s  %10s  %10s  %10s\n", "tensor", "max error", "allowed", "relative",
              "torch's");
  for (const auto& [name, tensor] : OUTPUTS) {
    if (!(ours.*tensor).defined()) continue;
    const Difference d = compare(name, ours.*tensor, exact.*tensor, tolerance(options.dtype, name));
    std::printf("%-6s  %10.2e  %10.2e  %10.2e", name, d.max_error, d.tolerance, d.relative);
    if ((theirs.*tensor).defined())
      std::printf("  %10.2e", compare(name, theirs.*tensor, exact.*tensor, 1).relative);
    std::printf("\n");
    if (!d) {
      std::printf("        %lld beyond, first %s\n", static_cast<long long>(d.beyond),
                  d.first.c_str());
      fine = false;
    }
  }
  return fine;
}

// Repeats the run. Returns a description of the first difference from `first`, or an empty string.
std::string repeat(const Options& options, Kernels& kernels, const Outputs& first) {
  for (int i = 0; i < options.repeats; ++i) {
    const Outputs again = run_once(options, kernels);
    for (const auto& [name, tensor] : OUTPUTS) {
      if (!(first.*tensor).defined()) continue;
      const std::string differ = compare_bits(name, again.*tensor, first.*tensor);
      if (!differ.empty()) return "run " + std::to_string(i + 2) + " differs in " + differ;
    }
  }
  return "";
}

bool print_repeats(const Options& options, Kernels& kernels, const Outputs& first) {
  if (options.repeats == 0) return true;
  kernels.set_dirty(true);
  const std::string differ = repeat(options, kernels, first);
  kernels.set_dirty(false);
  if (differ.empty())
    std::printf("\n%d more runs: every bit the same\n", options.repeats);
  else
    std::printf("\n%s\n", differ.c_str());
  return differ.empty();
}

void print_time(const char* pass, double ours, double torch) {
  std::printf("%-8s  ours %8.3f ms  torch %8.3f ms  torch / ours %5.2f\n", pass, ours, torch,
              torch / ours);
}

void print_times(const Options& options, Kernels& kernels, Peer& peer, at::Device device) {
  std::printf("\nmedians of %d runs; torch: %s\n", options.timing_runs, peer.name().c_str());
  const auto time = [&](auto&& work) { return median_ms(work, options.timing_runs, device); };
  Outputs outputs;
  print_time("forward", time([&] { kernels.forward(outputs); }), time([&] { peer.forward(); }));
  if (options.forward_only) return;
  print_time("backward", time([&] { kernels.backward(outputs); }), time([&] { peer.backward(); }));
}

}  // namespace

int run(const Options& options) {
  if (!at::hasCUDA() || at::detail::getCUDAHooks().deviceCount() <= options.device) {
    std::cerr << "error: no CUDA GPU " << options.device
              << " that " TORCH_NAME " can use\n\nhint: `--parse-only` needs none\n";
    return 3;
  }
  std::cout << options.describe();
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(options.device));
  const c10::DeviceGuard guard(device);
  const Inputs drawn = make_inputs(options);
  print_inputs(drawn);
  const Inputs inputs = to(drawn, device);

  Kernels kernels(options, inputs);
  Outputs ours;
  try {
    ours = run_once(options, kernels);
  } catch (const Refused& refused) {
    std::cerr << "error: " << refused.what() << "\n";
    return 2;
  }
  std::printf(TORCH_NAME "; kernels:\n");
  for (const std::string& symbol : last_kernels()) std::printf("  %s\n", symbol.c_str());
  std::printf("\n");

  std::optional<Peer> peer;
  Outputs theirs;
  if (options.timing_runs > 0) {
    peer.emplace(options, inputs);
    peer->record();
    if (!options.forward_only) peer->backward();
    theirs = peer->outputs();
  }
  bool fine = true;
  if (options.reference != "none") {
    const at::Device where = options.reference == "cpu" ? at::Device(at::kCPU) : device;
    fine = print_parity(options, ours, theirs, reference(options, to(inputs, where)));
  }
  fine = print_repeats(options, kernels, ours) && fine;
  if (peer) print_times(options, kernels, *peer, device);
  return fine ? 0 : 1;
}

}  // namespace flash_dist::debug
