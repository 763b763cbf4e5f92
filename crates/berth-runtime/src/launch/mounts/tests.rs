//! Table tests for container mounts.

use std::path::PathBuf;

use super::*;
use crate::launch::{fixture, inputs::ResolvedResources};

const PLAIN: MountContext = MountContext {
    is_privileged: false,
    has_read_only_root: false,
    has_group_namespace: true,
    users: None,
    host: SharedHostNamespaces { network: false, processes: false, ipc: false },
};

const USERS: (IdMap, IdMap) =
    (IdMap { inside: 0, outside: 65_536, count: 65_536 }, IdMap { inside: 0, outside: 65_536, count: 65_536 });

fn host_place() -> MountSource {
    MountSource::Host { path: "/h".into(), on: "/".into(), is_shared: false, is_slave: false }
}

fn asked(target: &str) -> cri::Mount {
    cri::Mount { container_path: target.to_owned(), host_path: "/h".to_owned(), ..Default::default() }
}

fn of_image(sub_path: &str) -> cri::Mount {
    cri::Mount {
        host_path: String::new(),
        readonly: true,
        image: Some(cri::ImageSpec { image: "i".to_owned(), ..Default::default() }),
        image_sub_path: sub_path.to_owned(),
        ..asked("/i")
    }
}

fn all(mounts_asked: Vec<cri::Mount>, style: MountContext) -> Result<Vec<Mount>, String> {
    let places = mounts_asked.iter().map(|_| host_place()).collect();
    all_at(mounts_asked, places, style)
}

fn all_at(mounts_asked: Vec<cri::Mount>, places: Vec<MountSource>, style: MountContext) -> Result<Vec<Mount>, String> {
    let facts = fixture::Facts {
        found: ResolvedResources { places, ..ResolvedResources::default() },
        ..fixture::Facts::default()
    };
    let config = cri::ContainerConfig { mounts: mounts_asked, ..fixture::container_config() };
    let sandbox = fixture::sandbox_config();
    mounts(&facts.inputs(&config, &sandbox), &style).map_err(|refusal| refusal.text)
}

fn targets(mounts: &[Mount]) -> Vec<&str> {
    mounts.iter().map(|mount| mount.target.as_str()).collect()
}

fn at<'a>(mounts: &'a [Mount], target: &str) -> &'a Mount {
    mounts.iter().find(|mount| mount.target == target).unwrap_or_else(|| panic!("{target}"))
}

#[test]
fn every_container_has_the_base_mounts_in_order() {
    let got = all(vec![], PLAIN).expect("mounts");
    let expected = [
        "/proc",
        "/dev",
        "/dev/pts",
        "/dev/mqueue",
        "/sys",
        "/sys/fs/cgroup",
        "/etc/hostname",
        "/etc/hosts",
        "/etc/resolv.conf",
        "/dev/shm",
    ];
    assert_eq!(targets(&got), expected);
    assert_eq!(at(&got, "/sys").access, Access::ReadOnly);
    assert_eq!(at(&got, "/etc/hosts").access, Access::ReadWrite);
    assert_eq!(at(&got, "/etc/hosts").source, MountKind::Bind("/s/hosts".into()));
    assert_eq!(at(&got, "/dev/shm").source, MountKind::Bind("/s/shm".into()));
    let read_only = all(vec![], MountContext { has_read_only_root: true, ..PLAIN }).expect("mounts");
    assert_eq!(at(&read_only, "/etc/hosts").access, Access::ReadOnly);
    assert_eq!(at(&read_only, "/dev/shm").access, Access::ReadWrite);
    let privileged = MountContext { is_privileged: true, has_group_namespace: false, ..PLAIN };
    let privileged = all(vec![], privileged).expect("mounts");
    assert_eq!(at(&privileged, "/sys").access, Access::ReadWrite);
    let cgroup = at(&privileged, "/sys/fs/cgroup");
    let expected = MountKind::New { kind: "cgroup".into(), data: "nsdelegate".into() };
    assert_eq!((cgroup.access, &cgroup.source), (Access::ReadWrite, &expected));
}

#[test]
fn the_hosts_file_systems_are_shown_where_a_fresh_one_is_forbidden() {
    let shares_all = SharedHostNamespaces { network: true, processes: true, ipc: true };
    let got = all(vec![], MountContext { users: Some(USERS), host: shares_all, ..PLAIN }).expect("mounts");
    for path in ["/proc", "/sys", "/dev/mqueue"] {
        assert_eq!(at(&got, path).source, MountKind::Bind(PathBuf::from(path)));
    }
    assert_eq!(at(&got, "/sys").access, Access::RecursivelyReadOnly);
    assert_eq!(at(&got, "/etc/hosts").ids, Some(USERS));
    for style in [MountContext { users: Some(USERS), ..PLAIN }, MountContext { host: shares_all, ..PLAIN }] {
        let got = all(vec![], style).expect("mounts");
        assert!(matches!(at(&got, "/proc").source, MountKind::New { .. }));
        assert!(matches!(at(&got, "/sys").source, MountKind::New { .. }));
    }
}

#[test]
fn requests_take_the_place_of_ours_and_outer_ones_come_first() {
    let got = all(vec![asked("/a/b/c"), asked("/etc/hosts"), asked("a"), asked("/sys/fs/cgroup")], PLAIN);
    let got = got.expect("mounts");
    let expected = [
        "/proc",
        "/dev",
        "/dev/pts",
        "/dev/mqueue",
        "/sys",
        "/a",
        "/etc/hostname",
        "/etc/resolv.conf",
        "/dev/shm",
        "/etc/hosts",
        "/a/b/c",
        "/sys/fs/cgroup",
    ];
    assert_eq!(targets(&got), expected);
    assert_eq!(at(&got, "/etc/hosts").source, MountKind::Bind("/h".into()));
    let got = all(vec![asked("/dev")], PLAIN).expect("mounts");
    assert_eq!(
        targets(&got),
        ["/proc", "/sys", "/sys/fs/cgroup", "/dev", "/etc/hostname", "/etc/hosts", "/etc/resolv.conf"]
    );
    assert_eq!(targets(&all(vec![asked("/x/../../y/")], PLAIN).expect("mounts")).get(6), Some(&"/y"));
    assert!(all(vec![asked("")], PLAIN).is_err());
    for (target, is_fine) in
        [("/proc", true), ("/proc/cpuinfo", true), ("/proc/self/attr", false), ("/x/../proc/1", false), ("/", false)]
    {
        assert_eq!(all(vec![asked(target)], PLAIN).is_ok(), is_fine, "{target}");
    }
}

#[test]
fn propagation_needs_a_source_that_has_it() {
    let place = |is_shared, is_slave| MountSource::Host { path: "/p".into(), on: "/m".into(), is_shared, is_slave };
    let slave = "path \"/p\" is mounted on \"/m\" but it is not a shared or slave mount";
    let shared = "path \"/p\" is mounted on \"/m\" but it is not a shared mount";
    // AC-09a-X11: each mount is checked on its own.
    for (propagation, is_shared, is_slave, expected) in [
        (0, false, false, Ok(Propagation::Private)),
        (0, true, false, Ok(Propagation::Private)),
        (1, true, false, Ok(Propagation::Slave)),
        (1, false, true, Ok(Propagation::Slave)),
        (1, false, false, Err(slave)),
        (2, true, true, Ok(Propagation::Shared)),
        (2, false, true, Err(shared)),
        (2, false, false, Err(shared)),
        (3, true, true, Err("unknown mount propagation 3")),
    ] {
        let mount = cri::Mount { propagation, ..asked("/t") };
        let got = all_at(vec![mount], vec![place(is_shared, is_slave)], PLAIN).map(|all| at(&all, "/t").propagation);
        assert_eq!(got, expected.map_err(str::to_owned), "{propagation} {is_shared} {is_slave}");
    }
    let both = vec![cri::Mount { propagation: 2, ..asked("/s") }, asked("/t")];
    let config = cri::ContainerConfig { mounts: both, ..Default::default() };
    assert!(is_shared(&config));
    assert!(!is_shared(&fixture::container_config()));
}

#[test]
fn recursive_read_only_has_conditions() {
    let mount = |readonly, propagation| cri::Mount { readonly, propagation, recursive_read_only: true, ..asked("/t") };
    let place = || vec![MountSource::Host { path: "/p".into(), on: "/".into(), is_shared: true, is_slave: true }];
    for (readonly, propagation, expected) in [
        (true, 0, Ok(Access::RecursivelyReadOnly)),
        (false, 0, Err("recursive read-only mount conflicts with RW mount")),
        (true, 1, Err("recursive read-only mount needs private propagation")),
        (true, 2, Err("recursive read-only mount needs private propagation")),
    ] {
        let got = all_at(vec![mount(readonly, propagation)], place(), PLAIN).map(|all| at(&all, "/t").access);
        assert_eq!(got, expected.map_err(str::to_owned), "{readonly} {propagation}");
    }
    let refusal = of_request(&mount(true, 0), &host_place(), false).expect_err("a refusal");
    assert!(refusal.text.starts_with("RROUnsupported"));
    let plain = cri::Mount { readonly: true, ..asked("/t") };
    assert_eq!(all(vec![plain], PLAIN).map(|all| at(&all, "/t").access), Ok(Access::ReadOnly));
}

#[test]
fn images_are_mounted_read_only() {
    let place = || vec![MountSource::Image { layers: "/l".into(), lower: vec!["2/d".into(), "1/d".into()] }];
    let got = all_at(vec![of_image("a/./b")], place(), PLAIN).expect("mounts");
    let layers =
        MountKind::Layers { layers: "/l".into(), lower: vec!["2/d".into(), "1/d".into()], sub_path: "a/b".into() };
    assert_eq!((at(&got, "/i").access, &at(&got, "/i").source), (Access::ReadOnly, &layers));
    for (mount, text) in [
        (cri::Mount { readonly: false, ..of_image("") }, "readonly must be true while mount image"),
        (cri::Mount { host_path: "/h".into(), ..of_image("") }, "host_path must be empty while mount image"),
        (cri::Mount { image: Some(Default::default()), ..of_image("") }, "image must be specified while mount image"),
        (of_image("../x"), "image_sub_path \"../x\" is not below the image"),
        (of_image("/x"), "image_sub_path \"/x\" is not below the image"),
    ] {
        let got = all_at(vec![mount], place(), PLAIN).map(|_| ());
        assert_eq!(got, Err(format!("ImageVolumeMountFailed: {text}")));
    }
}

#[test]
fn volumes_of_images_give_way_to_requests() {
    let config = cri::ContainerConfig { mounts: vec![asked("/taken/")], ..fixture::container_config() };
    let found = ResolvedResources {
        places: vec![host_place()],
        volumes: [("/data".to_owned(), PathBuf::from("/v/1")), ("/taken".to_owned(), "/v/2".into())].into(),
        ..ResolvedResources::default()
    };
    let facts = fixture::Facts { found, ..fixture::Facts::default() };
    let sandbox = fixture::sandbox_config();
    let got = mounts(&facts.inputs(&config, &sandbox), &PLAIN).expect("mounts");
    assert_eq!(at(&got, "/data").source, MountKind::Bind("/v/1".into()));
    assert_eq!(at(&got, "/taken").source, MountKind::Bind("/h".into()));
}

#[test]
fn ids_of_mounts_are_one_range_each() {
    let line = |host_id| cri::IdMapping { host_id, container_id: 0, length: 65_536 };
    let mount = |uids: &[u32], gids: &[u32]| cri::Mount {
        uid_mappings: uids.iter().map(|id| line(*id)).collect(),
        gid_mappings: gids.iter().map(|id| line(*id)).collect(),
        ..asked("/t")
    };
    let got = all(vec![mount(&[65_536], &[65_536])], PLAIN).expect("mounts");
    assert_eq!(at(&got, "/t").ids, Some(USERS));
    assert!(all(vec![mount(&[1], &[])], PLAIN).is_err());
    let text = "only one mapping line supported, got 2 mapping lines".to_owned();
    assert_eq!(all(vec![mount(&[1, 2], &[1])], PLAIN), Err(text));
}
