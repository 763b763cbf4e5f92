//! What pods of an embedded runtime leave on the machine, and its removal: also after a test that failed.

use std::{
    cmp::Reverse,
    fs,
    path::{Path, PathBuf},
};

use berth_sys::{
    net_namespace,
    netlink::{Protocol, Socket, filter, route},
};
use nix::{
    mount::{MntFlags, umount2},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// Where files that name network namespaces are.
const NAMESPACES: &str = "/run/netns";

/// Names in a directory.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// The process whose argument is that folder.
pub fn shim_of(folder: &Path) -> Option<u32> {
    let wanted = folder.display().to_string();
    let pids = fs::read_dir("/proc").ok()?.flatten().filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    pids.into_iter().find(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).split('\0').nth(1) == Some(&wanted)
    })
}

/// Ends a process at once.
pub fn end(pid: u32) {
    let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL); // it may have ended
}

/// Ends the shims below a state directory, and what they hold.
pub fn end_shims(state: &Path) {
    for sandbox in names(&state.join("s")) {
        let Some(shim) = shim_of(&state.join("s").join(sandbox)) else { continue };
        // Those below first: they outlive it.
        below(shim).into_iter().chain([shim]).for_each(end);
    }
}

/// The processes below one, the deepest last.
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

/// The file that names a pod's network namespace, as long as it is there.
pub fn namespace_file(bridge: &str, sandbox: &str) -> PathBuf {
    let (begin, end) = (format!("{bridge}-"), format!("-{}", sandbox.get(..16).unwrap_or_default()));
    let all = names(Path::new(NAMESPACES));
    let found = all.iter().find(|name| name.starts_with(&begin) && name.ends_with(&end));
    // Where there is none: a name that nobody has.
    Path::new(NAMESPACES).join(found.cloned().unwrap_or_else(|| format!("{bridge}{end}")))
}

/// Removes the bridge, the packet filter's table and the namespaces of a runtime's pods.
pub fn remove_network(bridge: &str) {
    let own = format!("{bridge}-");
    for name in names(Path::new(NAMESPACES)).iter().filter(|name| name.starts_with(&own)) {
        let _ = net_namespace::unbind_file(&Path::new(NAMESPACES).join(name)); // the next one, then
    }
    if let Ok(mut socket) = Socket::open(Protocol::Route)
        && let Ok(Some(told)) = socket.ask(route::get_link(bridge))
        && let Some(link) = route::link(&told)
    {
        let _ = socket.request(route::delete_link(link.index));
    }
    let (begin, end) = filter::marks();
    if let Ok(mut socket) = Socket::open(Protocol::Netfilter) {
        let _ = socket.transaction(begin, vec![filter::delete_table(bridge)], end);
    }
}

/// Takes away the mounts below a folder, the deepest first.
pub fn unmount_below(folder: &str) {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mut below: Vec<&str> =
        mounts.lines().filter_map(|l| l.split(' ').nth(1)).filter(|target| target.starts_with(folder)).collect();
    below.sort_by_key(|target| Reverse(target.len()));
    for target in below {
        let _ = umount2(target, MntFlags::MNT_DETACH);
    }
}
