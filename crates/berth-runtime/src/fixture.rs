//! Test fixtures shared by several modules.

use std::sync::Arc;

use super::{
    container::{Container, Phase},
    sandbox::Sandbox,
    store::objects::{ContainerMeta, SandboxMeta, SandboxPhase, SandboxState, VERSION, pack},
};
use berth_proto::cri;
use berth_shim::plan::{LaunchPlan, PidNamespace, ProcessPlan, Root, RootKind};

/// A minimal launch plan.
pub fn plan(id: &str) -> LaunchPlan {
    LaunchPlan {
        container: id.to_owned(),
        groups: Vec::new(),
        has_group_namespace: false,
        processes: PidNamespace::Own,
        root: Root {
            stage: "/stage".into(),
            kind: RootKind::Directory("/".into()),
            is_read_only: false,
            is_shared: false,
        },
        mounts: Vec::new(),
        devices: Vec::new(),
        masked: Vec::new(),
        read_only: Vec::new(),
        process: ProcessPlan::default(),
        stdin: false,
        stdin_once: false,
        log: None,
        longest_record: 16384,
        limit_ms: 60_000,
        hooks: None,
    }
}

/// A newly created container.
pub fn container(id: &str) -> Container {
    let config = cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: id.to_owned(), attempt: 0 }),
        ..Default::default()
    };
    let meta = ContainerMeta {
        v: VERSION,
        id: id.to_owned(),
        sandbox_id: "s".to_owned(),
        name: format!("{id}_p_ns_u_0"),
        created_ns: 50,
        config: pack(&config),
        image_id: "sha256:1".to_owned(),
        image_digest: "r/x@sha256:2".to_owned(),
        image_name: "r/x:1".to_owned(),
        log_path: None,
        stop_signal: 15,
        user: (0, 0, vec![0]),
        group: "/berth/c".to_owned(),
        mounted: std::collections::BTreeMap::new(),
    };
    Container {
        meta: Arc::new(meta),
        config: Arc::new(config),
        phase: Phase::Created,
        resources: None,
        is_updated: false,
        is_stop_signal_sent: false,
        is_killed: false,
        is_removing: false,
        early_exit: None,
        plan: Arc::new(plan(id)),
        devices: Arc::default(),
    }
}

/// A ready sandbox without containers.
pub fn sandbox(id: &str) -> Sandbox {
    let config = cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: "p".to_owned(),
            namespace: "ns".to_owned(),
            uid: "u".to_owned(),
            attempt: 0,
        }),
        ..Default::default()
    };
    let meta = SandboxMeta {
        v: VERSION,
        id: id.to_owned(),
        name: "p_ns_u_0".to_owned(),
        created_ns: 40,
        config: pack(&config),
        runtime_handler: String::new(),
        netns: None,
        ips: Vec::new(),
        group: format!("/berth/{id}"),
        network: serde_json::Value::Null,
    };
    let state = SandboxState {
        v: VERSION,
        state: SandboxPhase::Ready,
        boot_id: "boot".to_owned(),
        resources: None,
        overhead: None,
    };
    Sandbox::from_record(meta, Some(state)).expect("readable")
}
