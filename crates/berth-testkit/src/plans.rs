//! Minimal launch and exec plans for the shim, as a base for tests.

use std::path::PathBuf;

use berth_shim::plan::{ExecPlan, LaunchPlan, PidNamespace, ProcessPlan, Root, RootKind};

/// Container on the host's root directory that runs a program: no cgroups, mounts, or log.
pub fn plain(id: &str, args: &[&str]) -> LaunchPlan {
    LaunchPlan {
        container: id.to_owned(),
        groups: Vec::new(),
        has_group_namespace: false,
        processes: PidNamespace::Own,
        root: Root {
            stage: PathBuf::from("/"),
            kind: RootKind::Directory(PathBuf::from("/")),
            is_read_only: false,
            is_shared: false,
        },
        mounts: Vec::new(),
        devices: Vec::new(),
        masked: Vec::new(),
        read_only: Vec::new(),
        process: process(args),
        stdin: false,
        stdin_once: false,
        log: None,
        longest_record: 16_384,
        limit_ms: 20_000,
        hooks: None,
    }
}

/// Exec of a program in a container.
pub fn exec(container: &str, exec: &str, args: &[&str]) -> ExecPlan {
    ExecPlan { container: container.to_owned(), exec: exec.to_owned(), process: process(args), keeps_orphans: false }
}

/// Process that runs a program.
pub fn process(args: &[&str]) -> ProcessPlan {
    ProcessPlan { args: args.iter().map(|arg| (*arg).to_owned()).collect(), ..ProcessPlan::default() }
}
