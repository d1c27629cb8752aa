//! `berth explain`: where every tensor of a model would go, and why, before anything is loaded.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::ExitCode;

use berth::config::{self, Config};
use berth::gguf::Model;
use berth::log::one_line;
use berth::memory::{arena, pinned, system};
use berth::moe::isa;
use berth::placement::{Device, Explanation, Facts, Load, Machine, Repack, Rules, Target, Targets, render};
use clap::{ArgMatches, Command, FromArgMatches};

/// The model and the options of llama.cpp that decide about places.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The model (the first part of a split one).
    model: PathBuf,
    #[command(flatten)]
    rules: RuleArgs,
    /// The model is read, not mapped (llama.cpp's --load-mode none).
    #[arg(long)]
    no_mmap: bool,
    /// Devices, as NAME or NAME:HOST_TYPE, comma-separated, in llama.cpp's order; for example CUDA0:CUDA_Host,CUDA1. `none`: no device. Also -dev.
    #[arg(long = "device", value_name = "NAME[:HOST],...")]
    devices: Vec<String>,
    /// Layers on the devices: a number, `all` or `auto` [default: all, if there is a device]. Also -ngl.
    #[arg(long, short_alias = 'g', visible_aliases = ["gpu-layers", "n-gpu-layers"], value_name = "N", value_parser = layers, allow_hyphen_values = true)]
    gpu: Option<Layers>,
    /// How the layers on the devices are split, for example 3,1; without it, llama.cpp goes by free memory, and equal shares are shown. Also -ts.
    #[arg(long, value_name = "N,N,...", value_parser = shares, allow_hyphen_values = true)]
    tensor_split: Option<Shares>,
    /// The CPU backend does not interleave weights (llama.cpp's --no-repack). Also -nr.
    #[arg(long, visible_alias = "nr")]
    no_repack: bool,
    /// List every tensor, not only what differs.
    #[arg(long)]
    all: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Write a map of the model as one self-contained page.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Fail if a rule matches nothing, or a place cannot be honoured.
    #[arg(long)]
    strict: bool,
}

/// Layers on the devices; none: all.
#[derive(Clone, Copy, Debug)]
struct Layers(Option<u32>);

/// As llama.cpp reads it; "auto" there means as many as fit, which only it can know. "all" is a number, so that it is seen to be asked for.
fn layers(text: &str) -> Result<Layers, String> {
    match text {
        "auto" | "-1" => Ok(Layers(None)),
        "all" | "-2" => Ok(Layers(Some(u32::MAX))),
        number => number.parse().map(|n| Layers(Some(n))).map_err(|_| "a number, all or auto is expected".to_owned()),
    }
}

/// What each device gets of the layers, in any unit.
#[derive(Clone, Debug)]
struct Shares(Vec<f32>);

/// As llama.cpp reads it: `,` or `/`, or several of them, between numbers, of which there is room for 15. It takes negative ones too, and what they
/// mean there nobody can want.
fn shares(text: &str) -> Result<Shares, String> {
    const MOST: usize = 15;
    let mut numbers = Vec::new();
    for number in text.split([',', '/']).filter(|n| !n.is_empty()) {
        let share: f32 = number.trim().parse().map_err(|_| format!("'{number}' is no number"))?;
        if !(share.is_finite() && share >= 0.0) {
            return Err(format!("'{number}' is no share: it must be finite and not negative"));
        }
        numbers.push(share);
    }
    match numbers.len() {
        0 => Err("a number for each device is expected".to_owned()),
        n if n > MOST => Err(format!("{n} shares are more than the {MOST} for which llama.cpp has room")),
        _ => Ok(Shares(numbers)),
    }
}

/// The devices with their shares, and whether those are only assumed. As in llama.cpp, a device that has no number gets nothing, and if all get
/// nothing it is as if there were none.
fn with_shares(devices: &[(&str, Option<&str>)], split: Option<&Shares>) -> (Vec<Device>, bool) {
    let given = |i: usize| split.and_then(|s| s.0.get(i).copied()).unwrap_or(0.0);
    let assumed = (0..devices.len()).all(|i| given(i) == 0.0);
    let share = |i| if assumed { 1.0 } else { given(i) };
    (devices.iter().enumerate().map(|(i, (name, host))| Device::new(name, *host, share(i))).collect(), assumed)
}

fn first_layers(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| "a number of layers is expected".to_owned())
}

/// The rules in the order they were typed, which decides.
#[derive(Debug, Default)]
struct RuleArgs(Vec<RuleArg>);

#[derive(Debug)]
enum RuleArg {
    Override(String),
    CpuMoe,
    NCpuMoe(u32),
    NCpuFfn(u32),
}

#[derive(clap::Args)]
struct Declared {
    /// Rules: PATTERN=PLACE, comma-separated; places are CPU, CPU_MMAP, CUDA_Host, ARENA and the devices. Also -ot.
    #[arg(long = "override-tensor", visible_alias = "ot", value_name = "RULES")]
    overrides: Vec<String>,
    /// All experts to CPU. Also -cmoe.
    #[arg(long, action = clap::ArgAction::Append, num_args = 0, default_missing_value = "true", value_name = "")]
    cpu_moe: Vec<bool>,
    /// The experts of the first N layers to CPU. Also -ncmoe.
    #[arg(long, value_name = "N", value_parser = first_layers, allow_hyphen_values = true)]
    n_cpu_moe: Vec<u32>,
    /// The dense feed-forward weights of the first N layers to CPU. Also -ncffn.
    #[arg(long, value_name = "N", value_parser = first_layers, allow_hyphen_values = true)]
    n_cpu_ffn: Vec<u32>,
}

impl clap::Args for RuleArgs {
    fn augment_args(command: Command) -> Command {
        Declared::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Declared::augment_args(command)
    }
}

impl FromArgMatches for RuleArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let declared = Declared::from_arg_matches(matches)?;
        let at = |id: &str| matches.indices_of(id).into_iter().flatten().collect::<Vec<_>>();
        let mut all: Vec<(usize, RuleArg)> = Vec::new();
        all.extend(at("overrides").into_iter().zip(declared.overrides.into_iter().map(RuleArg::Override)));
        all.extend(at("cpu_moe").into_iter().zip(declared.cpu_moe.iter().map(|_| RuleArg::CpuMoe)));
        all.extend(at("n_cpu_moe").into_iter().zip(declared.n_cpu_moe.into_iter().map(RuleArg::NCpuMoe)));
        all.extend(at("n_cpu_ffn").into_iter().zip(declared.n_cpu_ffn.into_iter().map(RuleArg::NCpuFfn)));
        all.sort_by_key(|(index, _)| *index);
        Ok(RuleArgs(all.into_iter().map(|(_, rule)| rule).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// llama.cpp's own spelling of options that clap would read as a row of letters.
pub(crate) fn long_spelling(arg: OsString) -> OsString {
    const STOCK: [(&str, &str); 8] = [
        ("-ot", "--override-tensor"),
        ("-cmoe", "--cpu-moe"),
        ("-ncmoe", "--n-cpu-moe"),
        ("-ncffn", "--n-cpu-ffn"),
        ("-ngl", "--gpu"),
        ("-nr", "--no-repack"),
        ("-dev", "--device"),
        ("-ts", "--tensor-split"),
    ];
    STOCK.iter().find(|(short, _)| arg == *short).map_or(arg, |(_, long)| OsString::from(long))
}

/// Prints the explanation.
pub(crate) fn run(args: &Args) -> ExitCode {
    // Of all messages only that about a rule has several lines; a path in another must not add one.
    let explained = devices(&args.devices)
        .map_err(|e| one_line(&format!("--device: {e}")))
        .and_then(|devices| Ok((rules(args, &devices)?, devices)))
        .and_then(|(rules, devices)| explain(args, &rules, &devices).map_err(|e| one_line(&e)));
    crate::finish("explain", explained)
}

fn rules(args: &Args, devices: &[(&str, Option<&str>)]) -> Result<Rules, String> {
    let mut rules = Rules::new(Targets::new(devices.iter().map(|d| d.0)));
    for arg in &args.rules.0 {
        let added = match arg {
            RuleArg::Override(text) => rules.parse(text),
            RuleArg::CpuMoe => rules.cpu_moe(),
            RuleArg::NCpuMoe(n) => rules.n_cpu_moe(*n),
            RuleArg::NCpuFfn(n) => rules.n_cpu_ffn(*n),
        };
        added.map_err(|e| format!("{}\n{}", one_line(&e.to_string()), e.excerpt()))?;
    }
    Ok(rules)
}

fn explain(args: &Args, rules: &Rules, devices: &[(&str, Option<&str>)]) -> Result<ExitCode, String> {
    let model = Model::open(&args.model).map_err(|e| e.to_string())?;
    // What is wrong with a setting is a warning of the explanation; the defaults stand in for it.
    let settings = config::get().cloned().unwrap_or_default();
    let (with_shares, assumed_shares) = with_shares(devices, args.tensor_split.as_ref());
    let load = Load {
        mmap: !args.no_mmap,
        // With BERTH_FUSE=0 the device claims nothing, experts included.
        auto_experts: settings.auto && settings.fuse,
        offload_min_batch: Some(settings.offload_min_batch),
        devices: with_shares,
        assumed_shares,
        gpu_layers: args.gpu.and_then(|l| l.0),
        repack: if args.no_repack { Repack::Off } else { repack() },
        ..Facts::of(model.header()).load()
    };
    let machine = machine(rules);
    let explained = Explanation::of_model(&model, rules, &load, machine).map_err(|e| e.to_string())?;
    if let Some(path) = &args.html {
        let inode = |p: &std::path::Path| std::fs::metadata(p).map(|m| (m.dev(), m.ino())).ok();
        if model.parts().iter().any(|part| inode(path).is_some_and(|i| inode(part.path()) == Some(i))) {
            return Err(format!("{} is the model itself", path.display()));
        }
        refuse_foreign(path)?;
        berth::report::replace_file(path, render::html(&explained).as_bytes(), berth::report::Mode::Kept).map_err(|e| e.to_string())?;
    }
    crate::print(&if args.json { render::json(&explained) + "\n" } else { render::table(&explained, args.all) })?;
    let idle = explained.rules.iter().any(|r| r.is_idle());
    Ok(if args.strict && (idle || explained.has_unhonoured()) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Whatever is in that place already must be a page of ours, or empty. (Links and the like are refused when it is written.)
fn refuse_foreign(path: &std::path::Path) -> Result<(), String> {
    const HEAD: u64 = 1 << 16;
    let at = |e: std::io::Error| format!("{}: {e}", path.display());
    if !std::fs::symlink_metadata(path).is_ok_and(|m| m.is_file() && m.len() > 0) {
        return Ok(());
    }
    let mut head = Vec::new();
    std::fs::File::open(path).and_then(|file| file.take(HEAD).read_to_end(&mut head)).map_err(at)?;
    let ours = render::is_page(&String::from_utf8_lossy(&head));
    if ours { Ok(()) } else { Err(format!("{} exists and is no page of berth explain; name another file, or remove it", path.display())) }
}

/// What this machine has of what the rules name. The CUDA driver and the arena's directory are not touched if no rule needs them.
fn machine(rules: &Rules) -> Machine {
    let mut machine = Machine { available: system::ram().map(|r| r.available), memlock: system::memlock_limit(), ..Machine::default() };
    let names = |target: Target| rules.iter().any(|r| *r.target() == target);
    if names(Target::CudaHost) {
        machine.no_pinned = pinned::driver().err().map(|e| e.message);
    }
    match config::get() {
        Ok(config) if names(Target::Arena) => arena_directory(config, &mut machine),
        Ok(_) => {}
        Err(error) => machine.bad_setting = Some(error.message),
    }
    if let (None, Err(error)) = (&machine.bad_setting, isa::detect()) {
        machine.bad_setting = Some(error.message);
    }
    machine
}

fn arena_directory(config: &Config, machine: &mut Machine) {
    let Some(path) = config.arena_dir.as_deref() else {
        machine.no_arena = Some("neither BERTH_ARENA_DIR nor XDG_CACHE_HOME nor HOME is set".to_owned());
        return;
    };
    // A directory that Berth would make is made when a model is loaded, and not before. It will lie where the nearest one above does.
    let missing = !path.exists() && !path.is_symlink();
    let open = if missing { arena::Directory::above } else { arena::Directory::open };
    match open(path, config.arena_dir_is_default).and_then(|d| d.try_file().map(|()| d)) {
        Ok(directory) => {
            machine.arena_free = directory.free_bytes().ok();
            machine.arena_in_memory = directory.in_memory.then(|| path.display().to_string());
        }
        Err(error) => machine.no_arena = Some(error.message),
    }
}

/// The devices of every `--device`, each with its host type. As in llama.cpp, `none` alone is none, and the CPU cannot be one; its names differ in
/// more than the case of their letters.
fn devices(given: &[String]) -> Result<Vec<(&str, Option<&str>)>, String> {
    let mut all: Vec<(&str, Option<&str>)> = Vec::new();
    let listed: Vec<&str> = given.iter().flat_map(|list| list.split(',')).collect();
    if listed == ["none"] {
        return Ok(all);
    }
    for text in listed {
        let (name, host) = device(text);
        match name {
            "none" => return Err("'none' stands alone: there are other devices beside it".to_owned()),
            _ if name.eq_ignore_ascii_case("CPU") => {
                return Err("the CPU is no device that layers go to; `none` is for no device at all".to_owned());
            }
            _ => all.push((name, host)),
        }
    }
    Targets::check_devices(all.iter().copied())?;
    Ok(all)
}

/// Name and host type. A name may hold an address in brackets: `RPC0[127.0.0.1:50052]`.
fn device(text: &str) -> (&str, Option<&str>) {
    let name_ends = text.rfind(']').map_or(0, |at| at + 1);
    match text[name_ends..].find(':') {
        Some(at) => (&text[..name_ends + at], Some(&text[name_ends + at + 1..])),
        None => (text, None),
    }
}

/// What stock's CPU backend would interleave on this machine.
fn repack() -> Repack {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") {
        return Repack::Avx512;
    } else if is_x86_feature_detected!("avx2") {
        return Repack::Avx2;
    }
    Repack::Off
}
