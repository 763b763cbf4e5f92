//! Node log query on a real journal, read by `journalctl`.
//!
//! Tests report their names and are skipped without systemd's programs.

use std::{
    io::Write,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
};

use berth::serving::node_logs::MachineLogs;
use berth_server::{ports::NodeLogs, routes::node_logs};

use crate::endpoints::{get, status_and_body};

/// Writes a journal from export-format entries.
const WRITER: &str = "/lib/systemd/systemd-journal-remote";
/// 2026-03-04T05:06:07Z, in seconds since the epoch.
const FIRST: u64 = 1_772_600_767;

/// An entry in systemd's export format: seconds after the first, the boot, unit and message.
fn entry((second, boot, unit, message): (u64, char, &str, &str)) -> String {
    let boot: String = std::iter::repeat_n(boot, 32).collect();
    let (real, monotonic) = ((FIRST + second) * 1_000_000, (second + 1) * 1_000_000);
    format!(
        "__REALTIME_TIMESTAMP={real}\n__MONOTONIC_TIMESTAMP={monotonic}\n_BOOT_ID={boot}\n_SYSTEMD_UNIT={unit}\n\
         _HOSTNAME=node\nSYSLOG_IDENTIFIER=test\nMESSAGE={message}\n\n"
    )
}

/// A directory with a journal, and a `journalctl` restricted to it; `None` if the programs are missing.
fn journal(folder: &Path) -> Option<Arc<dyn NodeLogs>> {
    let is_there = Command::new("journalctl").arg("--version").output().is_ok();
    if !is_there || !Path::new(WRITER).exists() {
        return None;
    }
    let entries = [
        (0, 'a', "kubelet.service", "an old life"),
        (60, 'b', "kubelet.service", "first"),
        (61, 'b', "other.service", "not asked for"),
        (120, 'b', "kubelet.service", "Second: $(reboot)"),
        (180, 'b', "kubelet.service", "third"),
    ];
    let output = format!("--output={}", folder.join("test.journal").display());
    let mut writer = Command::new(WRITER).arg(output).arg("-").stdin(Stdio::piped()).spawn().expect("a program");
    let text: String = entries.into_iter().map(entry).collect();
    writer.stdin.take().expect("piped").write_all(text.as_bytes()).expect("taken");
    assert!(writer.wait().expect("it ends").success());
    let script = folder.join("journalctl");
    std::fs::write(&script, format!("#!/bin/sh\nexec journalctl --directory={} \"$@\"\n", folder.display()))
        .expect("written");
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).expect("ours");
    Some(Arc::new(MachineLogs::new(folder.join("nothing"), script)))
}

#[tokio::test]
async fn a_journal_is_asked_for_what_is_meant() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(logs) = journal(folder.path()) else {
        return println!("skipped: a_journal_is_asked_for_what_is_meant: no journalctl or no systemd-journal-remote");
    };
    let all = ["an old life", "first", "Second: $(reboot)", "third"];
    for (query, wanted) in [
        ("query=kubelet", &all[..]),
        ("query=kubelet&query=other&tailLines=4", &["first", "not asked for", "Second: $(reboot)", "third"]),
        ("query=kubelet&tailLines=1", &["third"]),
        ("query=kubelet&tailLines=0", &[]),
        ("query=kubelet&sinceTime=2026-03-04T05:08:00Z", &["Second: $(reboot)", "third"]),
        ("query=kubelet&sinceTime=2026-03-04T07:08:00%2B02:00", &["Second: $(reboot)", "third"]),
        ("query=kubelet&untilTime=2026-03-04T05:07:30Z", &["an old life", "first"]),
        (
            "query=kubelet&sinceTime=2026-03-04T05:07:00Z&untilTime=2026-03-04T05:08:30Z",
            &["first", "Second: $(reboot)"],
        ),
        ("query=kubelet&pattern=SECOND", &[]),
        ("query=kubelet&pattern=second|first", &["first", "Second: $(reboot)"]),
        ("query=kubelet&pattern=%5C$%5C(reboot%5C)", &["Second: $(reboot)"]),
        ("query=kubelet&boot=-1", &["an old life"]),
        ("query=kubelet&boot=0", &["first", "Second: $(reboot)", "third"]),
    ] {
        let response = node_logs::read(&logs, true, &get(&format!("/logs/?{query}"), &[]), "").await;
        let (status, body) = status_and_body(response).await;
        let text = String::from_utf8(body).expect("text");
        let messages: Vec<&str> =
            text.lines().filter_map(|line| line.split_once("test: ")).map(|line| line.1).collect();
        assert_eq!((status, messages.as_slice()), (200, wanted), "{query}: {text}");
    }
}
