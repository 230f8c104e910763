#include "options.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <sstream>
#include <vector>

namespace flash_dist::debug {

namespace {

template <class... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

int64_t whole_number(const std::string& name, const std::string& text, int64_t least,
                     int64_t most = std::numeric_limits<int>::max()) {
  char* end = nullptr;
  errno = 0;
  const int64_t value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || errno != 0 || value < least || value > most)
    throw UsageError(
        join(name, " must be a whole number from ", least, " to ", most, ", got `", text, "`"));
  return value;
}

double positive_number(const std::string& name, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !std::isfinite(value) || value <= 0)
    throw UsageError(join(name, " must be a positive number, got `", text, "`"));
  return value;
}

const std::string& one_of(const std::string& name, const std::string& text,
                          const std::vector<const char*>& allowed) {
  std::string words;
  for (size_t i = 0; i < allowed.size(); ++i) {
    if (text == allowed[i]) return text;
    words += i == 0 ? "" : i + 1 < allowed.size() ? ", " : " or ";
    words += allowed[i];
  }
  throw UsageError(join(name, " must be ", words, ", got `", text, "`"));
}

// Parses LEFT,RIGHT; -1 is unbounded.
void parse_window(Mask& mask, const std::string& sides) {
  const size_t comma = sides.find(',');
  if (comma == std::string::npos)
    throw UsageError(join("--mask window needs two numbers, got `", mask.text, "`"),
                     "`window:128,0` lets a query see itself and the 128 keys before it");
  mask.left = static_cast<int>(whole_number("LEFT of --mask", sides.substr(0, comma), -1));
  mask.right = static_cast<int>(whole_number("RIGHT of --mask", sides.substr(comma + 1), -1));
}

Mask parse_mask(const std::string& text) {
  Mask mask;
  mask.text = text;
  const size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  const std::string argument = colon == std::string::npos ? "" : text.substr(colon + 1);
  if (text == "full") {
    mask.right = -1;
  } else if (text == "causal-top-left") {
    mask.bottom_right = false;
  } else if (name == "window") {
    parse_window(mask, argument);
  } else if (name == "block-causal") {
    mask.form = Mask::Form::BLOCK_CAUSAL;
    mask.blocks = static_cast<int>(whole_number("BLOCKS of --mask block-causal", argument, 1));
  } else if (text != "causal") {
    throw UsageError(
        join("--mask must be full, causal, causal-top-left, window:LEFT,RIGHT or "
             "block-causal:BLOCKS, got `",
             text, "`"));
  }
  return mask;
}

struct Option {
  const char* name;
  const char* value;  // placeholder of the value in the help; null: the option takes no value
  const char* help;
  std::function<void(Options&, const std::string&)> set;
};

Option number(const char* name, int Options::* field, int least, const char* help) {
  return {name, "N", help, [=](Options& o, const std::string& text) {
            o.*field = static_cast<int>(whole_number(name, text, least));
          }};
}

Option flag(const char* name, bool Options::* field, const char* help) {
  return {name, nullptr, help, [=](Options& o, const std::string&) { o.*field = true; }};
}

const std::vector<Option>& all_options() {
  static const std::vector<Option> options = {
      number("--batch", &Options::batch, 1, "sequences, 2"),
      {"--seqlen", "N", "queries and keys of a sequence, 1024",
       [](Options& o, const std::string& text) {
         o.seqlen_q = o.seqlen_k = static_cast<int>(whole_number("--seqlen", text, 1));
       }},
      number("--seqlen-q", &Options::seqlen_q, 1, "queries alone"),
      number("--seqlen-k", &Options::seqlen_k, 1, "keys alone"),
      {"--num-heads", "N", "heads of q, k and v, 8",
       [](Options& o, const std::string& text) {
         o.num_heads_q = o.num_heads_kv = static_cast<int>(whole_number("--num-heads", text, 1));
       }},
      number("--num-heads-q", &Options::num_heads_q, 1, "heads of q alone"),
      number("--num-heads-kv", &Options::num_heads_kv, 1, "heads of k and v alone"),
      number("--head-dim", &Options::head_dim, 8, "of q and k, 128"),
      number("--head-dim-v", &Options::head_dim_v, 8, "of v, as --head-dim"),
      {"--dtype", "NAME", "fp16, bf16, fp32 or ieee32 (fp32 by FFMA); bf16",
       [](Options& o, const std::string& text) {
         o.dtype = one_of("--dtype", text, {"fp16", "bf16", "fp32", "ieee32"});
       }},
      {"--mask", "MASK",
       "full, causal, causal-top-left, window:LEFT,RIGHT (-1: unbounded) or\n"
       "block-causal:BLOCKS; causal",
       [](Options& o, const std::string& text) { o.mask = parse_mask(text); }},
      {"--softmax-scale", "X", "factor on the scores, head_dim ** -0.5",
       [](Options& o, const std::string& text) {
         o.softmax_scale = positive_number("--softmax-scale", text);
       }},
      {"--seed", "N", "of the inputs, as torch.manual_seed; 0",
       [](Options& o, const std::string& text) {
         o.seed = static_cast<uint64_t>(
             whole_number("--seed", text, 0, std::numeric_limits<int64_t>::max()));
       }},
      number("--repeats", &Options::repeats, 0,
             "further runs, over memory full of NaN, whose bits must be\nthose of the first; 10"),
      number("--timing-runs", &Options::timing_runs, 0,
             "runs to time, ours and torch's; 0: torch's does not run at all; 50"),
      {"--reference", "WHERE", "gpu, cpu or none: where float64 is computed; gpu",
       [](Options& o, const std::string& text) {
         o.reference = one_of("--reference", text, {"gpu", "cpu", "none"});
       }},
      {"--budget-mb", "N", "MiB that the backward may use beside its statistics, 1536",
       [](Options& o, const std::string& text) {
         o.budget_mb = whole_number("--budget-mb", text, 0, 1 << 30);
       }},
      flag("--batch-invariant", &Options::batch_invariant, "bits independent of the batch"),
      flag("--forward-only", &Options::forward_only, "no backward"),
      number("--device", &Options::device, 0, "which GPU, 0"),
      flag("--parse-only", &Options::parse_only, "print the call and stop; needs no GPU"),
      flag("--help", &Options::help, "this text"),
  };
  return options;
}

const Option& find_option(const std::string& name) {
  for (const Option& option : all_options())
    if (name == option.name) return option;
  throw UsageError(join("unknown option `", name, "`"), "`attention_debug --help` lists them");
}

void check(const Options& o) {
  if (o.num_heads_q % o.num_heads_kv != 0)
    throw UsageError(join("--num-heads-kv must divide --num-heads-q (", o.num_heads_q, "), got ",
                          o.num_heads_kv));
  if (o.head_dim % 8 != 0 || o.head_dim > 512)
    throw UsageError(join("--head-dim must be a multiple of 8 from 8 to 512, got ", o.head_dim));
  if (o.head_dim_v % 8 != 0 || o.head_dim_v > o.head_dim)
    throw UsageError(join("--head-dim-v must be a multiple of 8 from 8 to --head-dim (", o.head_dim,
                          "), got ", o.head_dim_v));
}

}  // namespace

Options parse_options(const std::vector<std::string>& arguments) {
  Options options;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const size_t equals = arguments[i].find('=');
    const std::string name = arguments[i].substr(0, equals);
    const Option& option = find_option(name);
    if (option.value == nullptr) {
      if (equals != std::string::npos)
        throw UsageError(join(option.name, " takes no value, got `", arguments[i], "`"));
      option.set(options, "");
    } else if (equals != std::string::npos) {
      option.set(options, arguments[i].substr(equals + 1));
    } else if (i + 1 < arguments.size()) {
      option.set(options, arguments[++i]);
    } else {
      throw UsageError(join(option.name, " needs a value, got nothing"));
    }
  }
  if (options.head_dim_v == 0) options.head_dim_v = options.head_dim;
  check(options);
  if (options.softmax_scale == 0) options.softmax_scale = 1 / std::sqrt(options.head_dim);
  return options;
}

std::string Options::describe() const {
  return join("q    [", batch, ", ", seqlen_q, ", ", num_heads_q, ", ", head_dim, "] ", dtype,
              "\nk    [", batch, ", ", seqlen_k, ", ", num_heads_kv, ", ", head_dim, "]\nv    [",
              batch, ", ", seqlen_k, ", ", num_heads_kv, ", ", head_dim_v, "]\nmask ", mask.text,
              ", softmax_scale ", softmax_scale, ", seed ", seed, "\n");
}

std::string usage() {
  constexpr size_t HELP_COLUMN = 22;
  std::string text =
      "usage: attention_debug [--NAME VALUE ...]\n\n"
      "Runs the kernels of libflash_dist_kernels.so without Python, compares every tensor with\n"
      "float64 and times torch's attention beside them.\n\n";
  for (const Option& option : all_options()) {
    std::string line = join("  ", option.name, option.value == nullptr ? "" : " ",
                            option.value == nullptr ? "" : option.value);
    line.resize(std::max(line.size() + 1, HELP_COLUMN), ' ');
    for (const char c : std::string(option.help))
      line += c == '\n' ? "\n" + std::string(HELP_COLUMN, ' ') : std::string(1, c);
    text += line + "\n";
  }
  return text +
         "\nExit status: 0 fine, 1 a tensor is off or bits differ, 2 wrong usage or a call that "
         "the\n"
         "library refuses, 3 nothing could be checked.\n";
}

}  // namespace flash_dist::debug
