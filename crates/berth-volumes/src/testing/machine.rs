//! Test fakes: a scripted host with a mount list, sysfs disks and sessions, and volume requests.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    path::Path,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;

use super::{
    super::{
        attachable::{OpError, Removal, Usage},
        layout::PodLayout,
        machine::{HostOperations, KillPolicy, ProgramExit, RunError},
        operation::Operation,
        spec::{Mode, UniqueName, VolumeSpec},
    },
    locked,
};
use berth_sys::mount_table::Mount;
use berth_types::Pod;

type ScriptedResult = Result<(i32, &'static str), RunError>;
type Effect = Box<dyn Fn() + Send>;

/// Fake host with scripted programs and a list of mounts, which `mount` and `umount` change. All mounts of one source
/// share one device.
#[derive(Default)]
pub struct FakeMachine {
    calls: Mutex<Vec<String>>,
    answers: Mutex<BTreeMap<&'static str, VecDeque<ScriptedResult>>>,
    effects: Mutex<Vec<(String, &'static str, Effect)>>,
    /// Mounts with their sources.
    table: Mutex<Vec<(String, Mount)>>,
}

impl FakeMachine {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Scripts the result of the next call of a program, which then has no effect.
    pub fn next(&self, program: &'static str, answer: ScriptedResult) {
        locked(&self.answers).entry(program).or_default().push_back(answer);
    }

    /// Scripts the effect and output of every call that contains these words.
    pub fn on(&self, words: &str, output: &'static str, effect: impl Fn() + Send + 'static) {
        locked(&self.effects).push((words.to_owned(), output, Box::new(effect)));
    }

    /// Returns every call so far.
    pub fn calls(&self) -> Vec<String> {
        locked(&self.calls).clone()
    }

    /// Adds a mount.
    pub fn mount(&self, source: &str, target: &Path) {
        self.mount_with(source, target, String::new());
    }

    fn mount_with(&self, source: &str, target: &Path, options: String) {
        let mut table = locked(&self.table);
        let known = table.iter().find(|(other, mount)| other == source || mount.target == Path::new(source));
        let device = known.map_or_else(|| format!("0:{}", table.len() + 1), |(_, mount)| mount.device.clone());
        let target = target.to_owned();
        let kind = "fake".to_owned();
        let mount = Mount { device, target, kind, is_shared: false, is_slave: false, options };
        table.push((source.to_owned(), mount));
    }

    /// Returns all mount points.
    pub fn targets(&self) -> Vec<String> {
        locked(&self.table).iter().map(|(_, mount)| mount.target.display().to_string()).collect()
    }

    fn changed_by(&self, program: &str, arguments: &[String]) -> i32 {
        let (Some(target), source) = (arguments.last(), arguments.iter().rev().nth(1)) else { return 0 };
        match (program, source) {
            ("mount", Some(source)) => {
                let options = arguments.iter().skip_while(|argument| *argument != "-o").nth(1);
                self.mount_with(source, Path::new(target), options.cloned().unwrap_or_default());
            }
            ("umount", _) => {
                let mut table = locked(&self.table);
                let Some(at) = table.iter().rposition(|(_, mount)| mount.target == Path::new(target)) else {
                    return 32;
                };
                table.remove(at);
            }
            _ => {}
        }
        0
    }
}

#[async_trait]
impl HostOperations for FakeMachine {
    async fn run(
        &self,
        _: &Operation,
        program: &str,
        arguments: &[String],
        _: KillPolicy,
    ) -> Result<ProgramExit, RunError> {
        let call = format!("{program} {}", arguments.join(" "));
        locked(&self.calls).push(call.clone());
        let answer = locked(&self.answers).get_mut(program).and_then(VecDeque::pop_front);
        let (code, output) = match answer {
            Some(answer) => answer?,
            None => {
                let effects = locked(&self.effects);
                let fitting: Vec<_> = effects.iter().filter(|(words, ..)| call.contains(words)).collect();
                fitting.iter().for_each(|(_, _, effect)| effect());
                (self.changed_by(program, arguments), fitting.first().map_or("", |one| one.1))
            }
        };
        Ok(ProgramExit { code: Some(code), how: format!("exit status {code}"), output: output.to_owned() })
    }

    fn mounts(&self) -> io::Result<Vec<Mount>> {
        Ok(locked(&self.table).iter().map(|(_, mount)| mount.clone()).collect())
    }

    fn bind(&self, source: &Path, target: &Path, read_only: bool, options: &[String]) -> Result<(), OpError> {
        let read_only = if read_only { " ro" } else { "" };
        let (from, to) = (source.display().to_string(), target.display());
        locked(&self.calls).push(format!("bind {from} {to}{read_only} {}", options.join(",")).trim_end().to_owned());
        self.mount(&from, target);
        Ok(())
    }
}

/// Creates a disk of the host below `root`, with links to it. Its device is a blank file.
pub fn disk(root: &Path, name: &str, links: &[&str]) {
    use std::{fs, os::unix::fs::symlink};
    let (dev, own) = (root.join("dev"), root.join("sys/block").join(name).join("device"));
    fs::create_dir_all(&own).expect("made");
    fs::write(own.join("delete"), "").expect("written");
    fs::create_dir_all(&dev).expect("made");
    fs::File::create(dev.join(name)).and_then(|file| file.set_len(1 << 20)).expect("a device");
    for link in links {
        let link = dev.join("disk").join(link);
        fs::create_dir_all(link.parent().expect("below a folder")).expect("made");
        // Another disk may have this link already: udev replaces it.
        let _ = fs::remove_file(&link);
        symlink(format!("../../{name}"), link).expect("linked");
    }
}

/// Creates an iSCSI session of the host below `root` with a target, and the disks of its LUNs.
pub fn session(root: &Path, host: u32, iqn: &str, address: &str, units: &[(i32, &str)]) {
    use std::fs;
    let write = |path: std::path::PathBuf, text: &str| {
        fs::create_dir_all(path.parent().expect("below a folder")).expect("made");
        fs::write(path, text).expect("written");
    };
    let class = root.join("sys/class");
    write(class.join(format!("scsi_host/host{host}/scan")), "");
    let session = class.join(format!("iscsi_host/host{host}/device/session{host}"));
    write(session.join(format!("iscsi_session/session{host}/targetname")), &format!("{iqn}\n"));
    let connection = format!("connection{host}:0");
    let own = session.join(&connection).join("iscsi_connection").join(&connection);
    for (file, text) in
        [("address", address), ("port", "3260"), ("persistent_address", address), ("persistent_port", "3260")]
    {
        write(own.join(file), &format!("{text}\n"));
    }
    for (lun, disk) in units {
        let unit = session.join(format!("target{host}:0:0/{host}:0:0:{lun}/block/{disk}"));
        fs::create_dir_all(unit).expect("made");
    }
}

/// Returns a pod's use of a volume.
pub fn usage(root: &Path, plugin: &str, spec: VolumeSpec) -> Usage {
    let pod = serde_json::json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": []}});
    let pod = Arc::new(Pod::new(serde_json::from_value(pod).expect("a pod")).expect("complete"));
    let layout = PodLayout::new(root, pod.uid()).expect("a good UID");
    let (mode, folder) = (spec.mode(), plugin.replace('/', "~"));
    let target = match mode {
        Mode::Filesystem => layout.volume(&folder, &spec.name),
        Mode::Block => layout.device(&folder, &spec.name),
    };
    Usage {
        unique: UniqueName::of_pod(plugin, pod.uid(), &spec.name),
        spec: Arc::new(spec),
        mode,
        layout,
        target,
        device: String::new(),
        group: None,
        user: None,
        label: None,
        has_other_users: false,
        is_republish: false,
        was_rebuilt: false,
        operation: Operation::default(),
        pod,
    }
}

/// Returns a removal: unpublish for the pod, or unstage.
pub fn removal(usage: &Usage, of_pod: bool) -> Removal {
    Removal {
        spec: usage.spec.clone(),
        unique: usage.unique.clone(),
        mode: usage.mode,
        pod: of_pod.then(|| (usage.pod.uid().clone(), usage.target.clone())),
        device: String::new(),
        operation: Operation::default(),
    }
}
