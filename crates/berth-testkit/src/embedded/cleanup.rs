//! Cleanup of embedded runtime resources (shims, mounts, network), also after failed tests.

use std::{
    cmp::Reverse,
    fs,
    path::{Path, PathBuf},
};

use berth_sys::{
    net_namespace,
    netlink::{NetlinkFamily, Socket, nf_tables, rtnetlink},
};
use nix::{
    mount::{MntFlags, umount2},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// Directory of the files that name network namespaces.
const NAMESPACES: &str = "/run/netns";

/// Names of the entries of a directory.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// PID of the shim whose argument is that directory.
pub fn shim_of(folder: &Path) -> Option<u32> {
    let wanted = folder.display().to_string();
    let pids = fs::read_dir("/proc").ok()?.flatten().filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    pids.into_iter().find(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).split('\0').nth(1) == Some(&wanted)
    })
}

/// Kills a process.
pub fn end(pid: u32) {
    let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL); // it may have exited
}

/// Kills the shims below a state directory, and their containers.
pub fn end_shims(state: &Path) {
    for sandbox in names(&state.join("s")) {
        let Some(shim) = shim_of(&state.join("s").join(sandbox)) else { continue };
        // Descendants first: they outlive the shim.
        below(shim).into_iter().chain([shim]).for_each(end);
    }
}

/// Descendants of a process, parents before their children.
fn below(pid: u32) -> Vec<u32> {
    let mut all: Vec<u32> = Vec::new();
    let mut next = vec![pid];
    while let Some(parent) = next.pop() {
        let tasks = fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
        for task in tasks {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            let children: Vec<u32> = children.split_whitespace().filter_map(|pid| pid.parse().ok()).collect();
            next.extend(&children);
            all.extend(children);
        }
    }
    all
}

/// File that names a pod's network namespace.
pub fn namespace_file(bridge: &str, sandbox: &str) -> PathBuf {
    let (begin, end) = (format!("{bridge}-"), format!("-{}", sandbox.get(..16).unwrap_or_default()));
    let all = names(Path::new(NAMESPACES));
    let found = all.iter().find(|name| name.starts_with(&begin) && name.ends_with(&end));
    // If there is none: a name that does not exist.
    Path::new(NAMESPACES).join(found.cloned().unwrap_or_else(|| format!("{bridge}{end}")))
}

/// Removes the bridge, the nftables table, and the network namespaces of a runtime's pods.
pub fn remove_network(bridge: &str) {
    let own = format!("{bridge}-");
    for name in names(Path::new(NAMESPACES)).iter().filter(|name| name.starts_with(&own)) {
        let _ = net_namespace::unbind_file(&Path::new(NAMESPACES).join(name)); // best effort
    }
    if let Ok(mut socket) = Socket::open(NetlinkFamily::Route)
        && let Ok(Some(message)) = socket.query(rtnetlink::get_link(bridge))
        && let Some(link) = rtnetlink::link(&message)
    {
        let _ = socket.request(rtnetlink::delete_link(link.index));
    }
    let (begin, end) = nf_tables::batch_messages();
    if let Ok(mut socket) = Socket::open(NetlinkFamily::Netfilter) {
        let _ = socket.transaction(begin, vec![nf_tables::delete_table(bridge)], end);
    }
}

/// Unmounts every mount below a directory, deepest first.
pub fn unmount_below(folder: &str) {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mut below: Vec<&str> =
        mounts.lines().filter_map(|l| l.split(' ').nth(1)).filter(|target| target.starts_with(folder)).collect();
    below.sort_by_key(|target| Reverse(target.len()));
    for target in below {
        let _ = umount2(target, MntFlags::MNT_DETACH);
    }
}
