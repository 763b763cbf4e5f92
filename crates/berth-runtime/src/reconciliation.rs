//! Reconciles a sandbox record with its shim's report after a restart. Pure.
//! Implements spec 09 §8.

use super::{
    config::OomRule,
    container::{Container, Phase},
    sandbox::Sandbox,
};
use berth_shim::plan::Hello;

/// Updates a sandbox from its shim's `Hello`. Returns the ids of containers without a record, which the caller kills.
pub fn with_shim(sandbox: &mut Sandbox, hello: &Hello, rule: OomRule, now_ns: i64) -> Vec<String> {
    let mut unknown = Vec::new();
    for record in &hello.containers {
        let Some(container) = sandbox.containers.get_mut(&record.id) else {
            unknown.push(record.id.clone());
            continue;
        };
        container.mark_started(record.started);
        if let Some(exit) = &record.exit {
            container.mark_exited(exit, rule);
        }
    }
    for (id, container) in &mut sandbox.containers {
        if !hello.containers.iter().any(|record| record.id == *id) {
            container.mark_lost(now_ns);
        }
    }
    unknown
}

/// Marks a container as lost after a reboot ended its processes. `written_ns` is the time of its last record; 0:
/// unknown.
pub fn after_reboot(container: &mut Container, written_ns: i64, now_ns: i64) {
    let at = if written_ns == 0 { now_ns } else { written_ns };
    if container.phase != Phase::Created {
        container.mark_lost(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{container, sandbox};
    use berth_shim::plan::{ContainerRecord, Exit, StartTimings, StartedProcess};

    const RUN: StartedProcess =
        StartedProcess { pid: 7, start_ticks: 9, at_ns: 100, took: StartTimings { root: 0, clone: 0 } };

    fn shim_record(id: &str, code: Option<i32>) -> ContainerRecord {
        let exit =
            code.map(|code| Exit { code, is_signal: false, at_ns: 200, is_oom: false, oom_kills: 0, lost_lines: 0 });
        ContainerRecord { id: id.to_owned(), started: RUN, exit }
    }

    #[test]
    fn the_shim_knows_better() {
        // AC-09-E2: exits while no daemon ran have their exact codes
        let mut s = sandbox("s");
        for id in ["created", "ran-on", "ended", "lost", "started"] {
            let mut c = container(id);
            if matches!(id, "ran-on" | "ended" | "lost") {
                c.mark_started(RUN);
            }
            s.containers.insert(id.to_owned(), c);
        }
        let hello = Hello {
            version: 1,
            pid: 1,
            namespaces: Vec::new(),
            init: None,
            containers: vec![
                shim_record("ran-on", None),
                shim_record("ended", Some(42)),
                shim_record("started", None),
                shim_record("stranger", None),
            ],
            starting: Vec::new(),
            events: Vec::new(),
        };
        assert_eq!(with_shim(&mut s, &hello, OomRule::Strict, 500), ["stranger"]);
        let code = |id: &str| match &s.containers[id].phase {
            Phase::Exited(ended) => Some((ended.code, ended.finished_ns)),
            Phase::Created => None,
            Phase::Starting | Phase::Running(_) => Some((-1, 0)),
        };
        assert_eq!(code("created"), None);
        assert_eq!((code("ran-on"), code("started")), (Some((-1, 0)), Some((-1, 0))));
        assert_eq!((code("ended"), code("lost")), (Some((42, 200)), Some((255, 500))));
    }

    #[test]
    fn a_reboot_ends_what_ran() {
        let (mut made, mut ran) = (container("a"), container("b"));
        ran.mark_started(RUN);
        after_reboot(&mut made, 300, 900);
        after_reboot(&mut ran, 50, 900);
        assert_eq!(made.phase, Phase::Created);
        assert_eq!(ran.finished(), Some(100), "never before its start");
    }
}
