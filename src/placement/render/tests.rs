//! What the three forms show, on one small model.

use super::{html, json, table};
use crate::gguf::Header;
use crate::gguf::testing::File;
use crate::placement::explain::{Explanation, Machine};
use crate::placement::{Device, Facts, Rules, Targets};

fn file(name: &str) -> File {
    let mut f = File::new(3)
        .str("general.architecture", "qwen3moe")
        .str("general.name", name)
        .u32("qwen3moe.block_count", 3)
        .u32("qwen3moe.expert_count", 128)
        .u32("qwen3moe.expert_used_count", 8)
        .tensor("token_embd.weight", &[256, 640], 14);
    for layer in 0..3 {
        f = f
            .tensor(&format!("blk.{layer}.attn_norm.weight"), &[256], 0)
            .tensor(&format!("blk.{layer}.attn_q.weight"), &[256, 256], 12)
            .tensor(&format!("blk.{layer}.ffn_up_exps.weight"), &[256, 64, 32], 12);
    }
    f.tensor("output_norm.weight", &[256], 0).tensor("output.weight", &[256, 640], 14)
}

fn explained(file: &File, text: &str) -> Explanation {
    let header = Header::from_bytes(&file.bytes()).unwrap();
    let mut rules = Rules::new(Targets::new(["CUDA0"]));
    rules.parse(text).unwrap();
    rules.n_cpu_moe(50).unwrap();
    let mut load = Facts::of(&header).load();
    load.devices.push(Device::new("CUDA0", Some("CUDA_Host"), 1.0));
    let machine = Machine { available: Some(1 << 30), memlock: Some(8 << 20), ..Machine::default() };
    Explanation::of_header(&header, &rules, &load, machine).unwrap()
}

#[test]
fn table_shows_every_tensor_rule_and_place_in_columns() {
    let e = explained(&file("Tiny"), r"blk\.[01]\.ffn_.*exps=CUDA_Host,nothing=ARENA");
    let text = table(&e, false);
    println!("{text}");
    assert!(text.contains("Tiny: qwen3moe, 3 layers, 128 experts, 8 used, 12 tensors"));
    assert!(text.contains("blk.[0-1].ffn_up_exps.weight") && text.contains("blk.2.ffn_up_exps.weight"));
    assert!(text.contains("nothing=ARENA   <== decides nothing"));
    assert!(text.contains("47 generated rules name layers that have nothing for them"));
    assert!(text.contains("WARNING rule_unmatched: Rule 2, nothing=ARENA, matches no tensor."));
    assert!(text.lines().all(|l| l.chars().count() <= 160 && !l.ends_with(' ')));
    let all = table(&e, true);
    for t in &e.tensors {
        assert!(all.lines().any(|l| l.starts_with(&t.name) && l.ends_with(t.reason.code())), "{}", t.name);
    }
}

#[test]
fn what_this_machine_lacks_is_said_where_it_is_shown() {
    let mut e = explained(&file("Tiny"), r"blk\.0\.ffn_.*exps=ARENA,exps=CUDA_Host");
    let fine = table(&e, false);
    assert!(fine.contains("576 KiB page-locked, 288 KiB in the arena") && !fine.contains("this machine"), "{fine}");
    assert!(!html(&e).contains("not on this machine"));
    (e.machine.no_pinned, e.machine.no_arena) = (Some("no driver".into()), Some("no directory".into()));
    let text = table(&e, false);
    let first = text.lines().nth(1).unwrap();
    assert!(first.contains("576 KiB asked to be page-locked, which this machine cannot do"), "{first}");
    assert!(first.contains("288 KiB asked to be in an arena, which this machine does not have"), "{first}");
    assert!(!text.contains("KiB page-locked") && !text.contains("KiB in the arena"), "{text}");
    for place in ["CUDA_Host ", "ARENA "] {
        let row = text.lines().find(|l| l.starts_with(place)).unwrap();
        assert!(row.ends_with("<== not on this machine: ordinary memory instead"), "{row}");
    }
    assert!(text.contains(" pinned? ") && text.contains(" arena? ") && text.contains("\n? asked for, and not on this machine"), "{text}");
    assert_eq!(html(&e).matches("not on this machine: ordinary memory instead").count(), 2);
}

#[test]
fn nothing_from_a_model_or_a_path_speaks_to_the_terminal() {
    let mut e = explained(&file("a\u{1b}[2Jb\u{9b}31mc\u{7f}\n\u{202e}\u{2028}"), "exps=ARENA");
    e.machine.no_arena = Some("/x\u{1b}]0;title\u{7}\u{9b}2J".into());
    e = Explanation { warnings: Vec::new(), ..e };
    e.tensors[0].name = "t\u{1b}[1m\u{202e}\u{2067}\u{feff}\u{200f}".into();
    e.warnings.push(crate::placement::Warning { code: "no_arena", message: "/x\u{1b}]0;title\u{7}\u{9b}2J".into() });
    for text in [table(&e, false), table(&e, true), json(&e), html(&e)] {
        assert!(!text.chars().any(|c| crate::text::is_loud(c) && c != '\n'), "{text:?}");
    }
    let back: serde_json::Value = serde_json::from_str(&json(&e)).unwrap();
    assert_eq!(back["model"]["name"], "a\u{1b}[2Jb\u{9b}31mc\u{7f}\n\u{202e}\u{2028}", "what JSON escapes is not lost");
}

#[test]
fn labels_of_the_axis_near_its_end_can_be_left_out() {
    // A layer of 361 KiB: the last tick, 320 KiB, stands at 89 % of the width.
    let page = html(&explained(&file("Tiny").tensor("blk.2.attn_k.weight", &[256, 256], 12), "exps=ARENA"));
    let far = |line: &str| line.split("left:").nth(1).and_then(|l| l.split('%').next()?.parse::<f64>().ok()).is_some_and(|at| at > 80.0);
    let spans: Vec<&str> = page.split("<span").filter(|s| s.contains("style=\"left:")).collect();
    assert!(spans.iter().any(|s| far(s)) && spans.iter().all(|s| far(s) == s.starts_with(" class=\"e\"")), "{spans:?}");
}

#[test]
fn json_has_every_tensor_with_stable_names() {
    let e = explained(&file("Tiny"), "exps=CUDA_Host");
    let v: serde_json::Value = serde_json::from_str(&json(&e)).unwrap();
    let t = v["tensors"].as_array().unwrap().iter().find(|t| t["name"] == "blk.1.ffn_up_exps.weight").unwrap();
    let expected = serde_json::json!({
        "name": "blk.1.ffn_up_exps.weight", "layer": 1, "class": "expert", "type": "q4_K", "bytes": 294912, "place": "CUDA_Host",
        "memory": "pinned", "rule": 1, "buft_overridden": true, "downgraded": false, "reason": "rule_host"
    });
    assert_eq!(*t, expected);
    assert_eq!(
        v["rules"][0],
        serde_json::json!({
            "number": 1, "pattern": "exps", "target": "CUDA_Host", "origin": "override-tensor", "won": 3, "bytes": 884736, "lost": 0
        })
    );
    assert_eq!(v["totals"]["pinned"], 884736);
    assert_eq!(v["model"]["architecture"], "qwen3moe");
}

#[test]
fn page_is_self_contained_and_escapes_what_comes_from_the_model() {
    let name = "<script>alert('x')</script> & \"co\"";
    let f = file(name).tensor("blk.2.<img src=x onerror=alert(1)>\"'", &[256, 256], 0);
    let page = html(&explained(&f, "exps=CUDA_Host,<b>=CPU"));
    for forbidden in ["<script", "<img", "<b>=", "http", "url(", "src=x onerror=alert(1)>", "@import", "<link"] {
        assert!(!page.contains(forbidden), "{forbidden}");
    }
    assert!(page.contains("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; &quot;co&quot;"));
    for tag in ["div", "span", "table", "tr", "td", "th", "code", "p", "ul", "li", "b", "i"] {
        let opened = page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
        assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "{tag}");
    }
    for shown in ["CUDA_Host", "decides nothing", "layer </span>2"] {
        assert!(page.contains(shown), "{shown}");
    }
}

#[test]
fn page_of_a_huge_model_stays_small() {
    let mut f = File::new(3).str("general.architecture", "x");
    for i in 0..50_000u64 {
        f = f.raw_tensor(format!("blk.{}.t{i}", i * 7 % 5003).as_bytes(), &[32], 0, i * 128);
    }
    f.data_bytes = Some(50_000 * 128);
    let page = html(&explained(&f, ".*=ARENA"));
    assert!(page.len() < 4 << 20, "{}", page.len());
    assert!(page.contains("further") && page.contains("more lines are left out"));
}

#[test]
fn a_file_without_architecture_and_tensors_has_whole_sentences() {
    let header = Header::from_bytes(&File::new(3).bytes()).unwrap();
    let rules = Rules::new(Targets::new([""; 0]));
    let e = Explanation::of_header(&header, &rules, &Facts::of(&header).load(), Machine::default()).unwrap();
    let text = table(&e, false);
    assert!(text.starts_with("(no name): (no architecture), 0 layers, 0 tensors\nmmap on: there is nothing to load\n"), "{text}");
}
