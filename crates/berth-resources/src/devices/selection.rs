//! Choice of devices for a container: pure decision steps of an allocation. Pure. Spec 06c §1.6 step 3.
//!
//! ```text
//!  select ─┬─► Unchanged, Take, or an error
//!          └─► Preferred ─► GetPreferredAllocation (by the caller) ─► resume ─► devices or an error
//! ```
//!
//! Within each set the lowest IDs in natural order are taken, so a choice is reproducible. The caller decides row 2 of
//! the table (the container runs since before a restart) before it calls [`select`]. The caller also reserves the
//! available devices of a [`PreferredSelection`] until the plugin has answered: `resume` checks no newer state.

use std::collections::BTreeSet;

use berth_types::{PodUid, fieldpath::quoted};

use super::model::{Device, DeviceId, Devices, NO_NODE};

/// Input of one choice.
pub struct SelectionInput<'a> {
    /// Resource name.
    pub resource: &'a str,
    /// UID of the pod, for error texts.
    pub pod: &'a PodUid,
    /// Name of the container, for error texts.
    pub container: &'a str,
    /// Number of devices requested.
    pub required: usize,
    /// Devices that the container already has.
    pub assigned: Option<&'a BTreeSet<DeviceId>>,
    /// Devices that the plugin reported, empty for a resource known only from the checkpoint; `None` if the resource
    /// is not registered.
    pub devices: Option<&'a Devices>,
    /// Devices assigned to any container, or reserved by an allocation in progress.
    pub in_use: &'a BTreeSet<DeviceId>,
    /// Devices of finished-style init containers of the pod, to be reused. Unhealthy ones are skipped.
    pub reusable: &'a BTreeSet<DeviceId>,
    /// NUMA nodes chosen by the topology manager; `None` without a preference.
    pub affinity: Option<&'a BTreeSet<i64>>,
    /// Whether the plugin implements `GetPreferredAllocation`.
    pub plugin_prefers: bool,
}

/// Result of [`select`].
#[derive(PartialEq, Eq, Debug)]
pub enum Selection {
    /// The container keeps the devices that it has; no `Allocate` call is needed.
    Unchanged,
    /// Exactly these devices are allocated, including reused ones.
    Take(BTreeSet<DeviceId>),
    /// `GetPreferredAllocation` is called, then the selection resumes with its answer.
    Preferred(PreferredSelection),
}

/// A selection that waits for the answer of `GetPreferredAllocation`.
#[derive(PartialEq, Eq, Debug)]
pub struct PreferredSelection {
    /// `available_deviceIDs` of the request: devices to choose from, including `must_include`.
    pub available: BTreeSet<DeviceId>,
    /// `must_include_deviceIDs` of the request: devices that are already chosen.
    pub must_include: BTreeSet<DeviceId>,
    /// `allocation_size` of the request: number of devices of the container, including `must_include`.
    pub size: usize,
    /// Devices to take, in this order, after the preferred ones.
    fallback: Vec<DeviceId>,
}

impl PreferredSelection {
    /// Completes the selection with the answer of the plugin; an empty answer states no preference.
    ///
    /// IDs that were not available, duplicates, and IDs beyond `size` are ignored. Missing ones are filled up.
    pub fn resume(self, preferred: &[DeviceId]) -> Result<BTreeSet<DeviceId>, SelectionError> {
        let Self { available, must_include: mut taken, size, fallback } = self;
        let eligible: BTreeSet<&DeviceId> = preferred.iter().filter(|id| available.contains(*id)).collect();
        fill_up(&mut taken, size, eligible);
        fill_up(&mut taken, size, &fallback);
        if taken.len() < size {
            return Err(SelectionError::Incomplete { requested: size, got: taken.len() });
        }
        Ok(taken)
    }
}

/// Reason why a container gets no devices. The texts are those of the reference kubelet.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SelectionError {
    /// The container has another number of devices than it requests.
    #[error(
        "pod {} container {} changed request for resource {} from {from} to {to}",
        quoted(.pod.as_str()),
        quoted(.container),
        quoted(.resource)
    )]
    RequestChanged {
        /// UID of the pod.
        pod: PodUid,
        /// Name of the container.
        container: String,
        /// Resource name.
        resource: String,
        /// Number of devices that the container has.
        from: usize,
        /// Number of devices requested.
        to: usize,
    },
    /// No plugin has registered the resource.
    #[error("cannot allocate unregistered device {resource}")]
    Unregistered {
        /// Resource name.
        resource: String,
    },
    /// The plugin reports no healthy device, or has not registered again since the restart.
    #[error("no healthy devices present; cannot allocate unhealthy devices {resource}")]
    NoHealthyDevices {
        /// Resource name.
        resource: String,
    },
    /// A device of the container is unhealthy or has vanished.
    #[error("previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}")]
    AssignedUnhealthy {
        /// Resource name.
        resource: String,
    },
    /// Too few healthy devices are free.
    #[error("requested number of devices unavailable for {resource}. Requested: {requested}, Available: {available}")]
    Unavailable {
        /// Resource name.
        resource: String,
        /// Number of devices needed in addition to reused ones.
        requested: usize,
        /// Number of healthy devices that are not in use.
        available: usize,
    },
    /// The available devices did not suffice although their number did.
    #[error("unexpectedly allocated less resources than required. Requested: {requested}, Got: {got}")]
    Incomplete {
        /// Number of devices requested.
        requested: usize,
        /// Number of devices chosen.
        got: usize,
    },
}

/// Chooses the devices of one resource for one container: rows 1 and 3 to 12 of the table.
pub fn select(input: &SelectionInput<'_>) -> Result<Selection, SelectionError> {
    let resource = || input.resource.to_owned();
    check_request(input)?;
    let devices = input.devices.ok_or_else(|| SelectionError::Unregistered { resource: resource() })?;
    let is_healthy = |id: &DeviceId| devices.get(id).is_some_and(|device| device.is_healthy);
    if !devices.values().any(|device| device.is_healthy) {
        return Err(SelectionError::NoHealthyDevices { resource: resource() });
    }
    if !input.assigned.into_iter().flatten().all(is_healthy) {
        return Err(SelectionError::AssignedUnhealthy { resource: resource() });
    }
    if input.assigned.is_some() || input.required == 0 {
        return Ok(Selection::Unchanged);
    }

    let mut taken = BTreeSet::new();
    fill_up(&mut taken, input.required, input.reusable.iter().filter(|id| is_healthy(id)));
    if taken.len() == input.required {
        return Ok(Selection::Take(taken));
    }
    let needed = input.required - taken.len();
    let available = AvailableDevices::new(input, devices, &taken);
    if available.len() < needed {
        let available = available.len();
        return Err(SelectionError::Unavailable { resource: resource(), requested: needed, available });
    }
    choose_by_alignment(input, taken, available)
}

/// Row 1: refuses a container that has another number of devices than it requests.
fn check_request(input: &SelectionInput<'_>) -> Result<(), SelectionError> {
    match input.assigned {
        Some(assigned) if assigned.len() != input.required => Err(SelectionError::RequestChanged {
            pod: input.pod.clone(),
            container: input.container.to_owned(),
            resource: input.resource.to_owned(),
            from: assigned.len(),
            to: input.required,
        }),
        _ => Ok(()),
    }
}

/// Rows 10 to 12: takes aligned devices before others. A plugin with preferences chooses among those not fixed by that.
fn choose_by_alignment(
    input: &SelectionInput<'_>,
    mut taken: BTreeSet<DeviceId>,
    available: AvailableDevices,
) -> Result<Selection, SelectionError> {
    let AvailableDevices { aligned, others } = available;
    let mut offered: BTreeSet<DeviceId> = taken.iter().chain(&aligned).cloned().collect();
    let fallback = if input.required - taken.len() < aligned.len() {
        aligned
    } else {
        fill_up(&mut taken, input.required, &aligned);
        if taken.len() == input.required {
            return Ok(Selection::Take(taken));
        }
        offered.extend(others.iter().cloned());
        others
    };
    let selection = PreferredSelection { available: offered, must_include: taken, size: input.required, fallback };
    if input.plugin_prefers {
        return Ok(Selection::Preferred(selection));
    }
    selection.resume(&[]).map(Selection::Take)
}

/// Adds `ids` in their order until `taken` has `size` devices.
fn fill_up<'a>(taken: &mut BTreeSet<DeviceId>, size: usize, ids: impl IntoIterator<Item = &'a DeviceId>) {
    for id in ids {
        if taken.len() >= size {
            return;
        }
        taken.insert(id.clone());
    }
}

/// Alignment of a device with the NUMA affinity of a container, in the order of preference.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Alignment {
    /// The device is on at least one node of the affinity.
    Aligned,
    /// All nodes of the device are outside the affinity.
    Unaligned,
    /// The device has no topology, or the container has no affinity.
    NoTopology,
}

impl Alignment {
    fn of(device: &Device, affinity: Option<&BTreeSet<i64>>) -> Self {
        let Some(affinity) = affinity else { return Self::NoTopology };
        // Some plugins report node -1 for a device without NUMA node.
        let mut nodes = device.nodes.iter().filter(|node| **node != NO_NODE).peekable();
        if nodes.peek().is_none() {
            Self::NoTopology
        } else if nodes.any(|node| affinity.contains(node)) {
            Self::Aligned
        } else {
            Self::Unaligned
        }
    }
}

/// Row 9: healthy devices that are not in use, in the order in which they are taken.
struct AvailableDevices {
    aligned: Vec<DeviceId>,
    /// Unaligned devices, then those without topology.
    others: Vec<DeviceId>,
}

impl AvailableDevices {
    fn new(input: &SelectionInput<'_>, devices: &Devices, taken: &BTreeSet<DeviceId>) -> Self {
        let is_free = |id: &DeviceId| !input.in_use.contains(id) && !taken.contains(id);
        let mut available: Vec<(Alignment, &DeviceId)> = (devices.iter())
            .filter(|(id, device)| device.is_healthy && is_free(id))
            .map(|(id, device)| (Alignment::of(device, input.affinity), id))
            .collect();
        available.sort();
        let (mut aligned, mut others) = (Vec::new(), Vec::new());
        for (alignment, id) in available {
            let group = if alignment == Alignment::Aligned { &mut aligned } else { &mut others };
            group.push(id.clone());
        }
        Self { aligned, others }
    }

    fn len(&self) -> usize {
        self.aligned.len() + self.others.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Owner of everything that a [`SelectionInput`] borrows.
    #[derive(Clone, Default, Debug)]
    struct Fixture {
        required: usize,
        assigned: Option<BTreeSet<DeviceId>>,
        devices: Option<Devices>,
        in_use: BTreeSet<DeviceId>,
        reusable: BTreeSet<DeviceId>,
        affinity: Option<BTreeSet<i64>>,
        plugin_prefers: bool,
    }

    impl Fixture {
        /// `required` devices of `listed`: IDs with `!` where unhealthy and `@` before each NUMA node.
        fn new(required: usize, listed: &str) -> Self {
            Self { required, devices: Some(listed.split_whitespace().map(device).collect()), ..Self::default() }
        }

        fn assigned(self, listed: &str) -> Self {
            Self { assigned: Some(ids(listed)), ..self }
        }

        fn in_use(self, listed: &str) -> Self {
            Self { in_use: ids(listed), ..self }
        }

        fn reusable(self, listed: &str) -> Self {
            Self { reusable: ids(listed), ..self }
        }

        fn affinity(self, nodes: &[i64]) -> Self {
            Self { affinity: Some(nodes.iter().copied().collect()), ..self }
        }

        fn plugin_prefers(self) -> Self {
            Self { plugin_prefers: true, ..self }
        }

        fn select(&self) -> Result<Selection, SelectionError> {
            select(&SelectionInput {
                resource: "example.com/res",
                pod: &PodUid::from("uid"),
                container: "c",
                required: self.required,
                assigned: self.assigned.as_ref(),
                devices: self.devices.as_ref(),
                in_use: &self.in_use,
                reusable: &self.reusable,
                affinity: self.affinity.as_ref(),
                plugin_prefers: self.plugin_prefers,
            })
        }

        /// The selection that waits for the plugin.
        fn preferred(&self) -> PreferredSelection {
            match self.select() {
                Ok(Selection::Preferred(selection)) => selection,
                other => panic!("expected a call of the plugin, got {other:?}"),
            }
        }

        fn error(&self) -> String {
            self.select().expect_err("an error").to_string()
        }
    }

    fn device(text: &str) -> (DeviceId, Device) {
        let mut parts = text.split('@');
        let id = parts.next().expect("split yields one part");
        let nodes = parts.map(|node| node.parse().expect("a node")).collect();
        (id.trim_end_matches('!').into(), Device { is_healthy: !id.ends_with('!'), nodes })
    }

    fn ids(listed: &str) -> BTreeSet<DeviceId> {
        listed.split_whitespace().map(DeviceId::from).collect()
    }

    fn list(listed: &str) -> Vec<DeviceId> {
        listed.split_whitespace().map(DeviceId::from).collect()
    }

    #[test]
    fn errors_have_the_texts_of_the_reference() {
        let unhealthy = "previously allocated devices are no longer healthy; cannot allocate unhealthy devices \
                         example.com/res";
        let unknown = "cannot allocate unregistered device example.com/res";
        let none = "no healthy devices present; cannot allocate unhealthy devices example.com/res";
        let changed = |from: usize, to: usize| {
            format!("pod \"uid\" container \"c\" changed request for resource \"example.com/res\" from {from} to {to}")
        };
        let unavailable = |requested: usize, available: usize| {
            format!(
                "requested number of devices unavailable for example.com/res. Requested: {requested}, \
                 Available: {available}"
            )
        };
        let unregistered = Fixture { required: 1, ..Fixture::default() };
        for (case, fixture, expected) in [
            ("row 1", Fixture::new(2, "d1 d2").assigned("d1"), changed(1, 2)),
            ("row 1: fewer", Fixture::new(0, "d1 d2").assigned("d1"), changed(1, 0)),
            ("row 1 precedes row 3", unregistered.clone().assigned(""), changed(0, 1)),
            ("row 3", unregistered.clone(), unknown.to_owned()),
            ("row 3 precedes row 6", unregistered.assigned("d1"), unknown.to_owned()),
            ("row 4", Fixture::new(1, "d1! d2!"), none.to_owned()),
            ("row 4: known from the checkpoint only", Fixture::new(1, "").assigned("d1"), none.to_owned()),
            ("row 4: nothing requested", Fixture::new(0, ""), none.to_owned()),
            ("row 4 precedes row 7", Fixture::new(1, "d1!").reusable("d1"), none.to_owned()),
            ("row 5: unhealthy", Fixture::new(2, "d1 d2! d3").assigned("d1 d2"), unhealthy.to_owned()),
            ("row 5: vanished", Fixture::new(1, "d1").assigned("d2"), unhealthy.to_owned()),
            ("AC-06c-5, row 8", Fixture::new(2, "d1 d2 d3").in_use("d1 d2"), unavailable(2, 1)),
            ("row 8: unhealthy", Fixture::new(2, "d1 d2!"), unavailable(2, 1)),
            ("row 8 after reuse", Fixture::new(3, "d1 d2").in_use("d1").reusable("d1"), unavailable(2, 1)),
            ("row 8: reused ones once", Fixture::new(2, "d1").reusable("d1"), unavailable(1, 0)),
            ("row 8 precedes the plugin", Fixture::new(2, "d1").plugin_prefers(), unavailable(2, 1)),
        ] {
            assert_eq!(fixture.error(), expected, "{case}");
        }
    }

    #[test]
    fn a_container_keeps_its_healthy_devices() {
        // AC-06c-10
        for (case, fixture) in [
            ("row 6", Fixture::new(2, "d1 d2 d3").assigned("d2 d3").in_use("d2 d3")),
            ("row 6 precedes rows 7 and 10", Fixture::new(1, "d1 d2").assigned("d2").reusable("d1").plugin_prefers()),
            ("another device is unhealthy", Fixture::new(1, "d1! d2").assigned("d2").in_use("d2")),
            ("nothing requested", Fixture::new(0, "d1")),
        ] {
            assert_eq!(fixture.select(), Ok(Selection::Unchanged), "{case}");
        }
    }

    #[test]
    fn without_a_preferring_plugin_aligned_devices_come_first() {
        let four = "d1@1 d2@0 d3 d4@0@1";
        for (case, fixture, expected) in [
            ("lowest in natural order", Fixture::new(2, "d10 d2 d1! d3"), "d2 d3"),
            ("free ones only", Fixture::new(1, "d1 d2").in_use("d1"), "d2"),
            ("no affinity ignores nodes", Fixture::new(1, four), "d1"),
            ("row 10", Fixture::new(1, four).affinity(&[0]), "d2"),
            ("one node inside suffices", Fixture::new(1, "d1 d2@0 d4@1@2").affinity(&[2]), "d4"),
            ("row 11: exactly the aligned", Fixture::new(2, four).affinity(&[0]), "d2 d4"),
            ("row 11: then unaligned", Fixture::new(3, four).affinity(&[0]), "d1 d2 d4"),
            ("row 11: then without topology", Fixture::new(4, four).affinity(&[0]), "d1 d2 d3 d4"),
            ("unaligned precede no topology", Fixture::new(1, "d1 d2@1").affinity(&[0]), "d2"),
            ("an empty affinity aligns none", Fixture::new(1, "d1 d2@1").affinity(&[]), "d2"),
            ("node -1 is no topology", Fixture::new(1, "d1@-1 d2@1").affinity(&[-1]), "d2"),
        ] {
            assert_eq!(fixture.select(), Ok(Selection::Take(ids(expected))), "{case}");
        }
    }

    #[test]
    fn devices_of_init_containers_are_reused_first() {
        for (case, fixture, expected) in [
            ("AC-06c-9", Fixture::new(1, "d1 d2").in_use("d2").reusable("d2"), "d2"),
            ("no more than needed", Fixture::new(1, "d1 d2").in_use("d1 d2").reusable("d1 d2"), "d1"),
            ("before aligned ones", Fixture::new(1, "d1@0 d2@1").in_use("d2").reusable("d2").affinity(&[0]), "d2"),
            ("before the plugin", Fixture::new(1, "d1 d2").in_use("d2").reusable("d2").plugin_prefers(), "d2"),
            ("and filled up", Fixture::new(2, "d1 d2 d3").in_use("d3").reusable("d3"), "d1 d3"),
            ("unless unhealthy", Fixture::new(1, "d1! d2").in_use("d1").reusable("d1"), "d2"),
            ("unless vanished", Fixture::new(1, "d2").in_use("d1").reusable("d1"), "d2"),
        ] {
            assert_eq!(fixture.select(), Ok(Selection::Take(ids(expected))), "{case}");
        }
    }

    #[test]
    fn the_preference_of_the_plugin_is_taken() {
        // AC-06c-8
        let selection = Fixture::new(1, "d1 d2 d3").plugin_prefers().preferred();
        assert_eq!(selection.resume(&list("d3")), Ok(ids("d3")));
    }

    #[test]
    fn the_plugin_receives_the_devices_to_choose_from() {
        let four = "d1@1 d2@0 d3 d4@0@1";
        for (case, fixture, available, must_include) in [
            ("row 10", Fixture::new(1, four).affinity(&[0]), "d2 d4", ""),
            ("row 10 with reuse", Fixture::new(2, four).affinity(&[0]).in_use("d3").reusable("d3"), "d2 d3 d4", "d3"),
            ("row 11", Fixture::new(3, four).affinity(&[0]), "d1 d2 d3 d4", "d2 d4"),
            ("row 11: no affinity", Fixture::new(1, "d1@0 d2! d3 d4").in_use("d4"), "d1 d3", ""),
            ("row 11: even without a choice", Fixture::new(2, "d1 d2"), "d1 d2", ""),
        ] {
            let selection = fixture.clone().plugin_prefers().preferred();
            assert_eq!(selection.available, ids(available), "{case}");
            assert_eq!(selection.must_include, ids(must_include), "{case}");
            assert_eq!(selection.size, fixture.required, "{case}");
        }
        // Exactly the aligned devices suffice: no call.
        let aligned = Fixture::new(2, four).affinity(&[0]).plugin_prefers();
        assert_eq!(aligned.select(), Ok(Selection::Take(ids("d2 d4"))));
    }

    #[test]
    fn an_odd_preference_is_cut_and_filled_up() {
        let four = "d1@1 d2@0 d3 d4@0@1";
        for (case, fixture, preferred, expected) in [
            ("none", Fixture::new(2, "d1 d2 d3"), "", "d1 d2"),
            ("unknown", Fixture::new(2, "d1 d2 d3"), "x d3", "d1 d3"),
            ("duplicate", Fixture::new(2, "d1 d2 d3"), "d3 d3", "d1 d3"),
            ("in use", Fixture::new(1, "d1 d2 d3").in_use("d2"), "d2", "d1"),
            ("unhealthy", Fixture::new(1, "d1 d2!"), "d2", "d1"),
            ("more than needed", Fixture::new(1, "d1 d2 d3"), "d3 d2", "d2"),
            ("without what it must include", Fixture::new(2, "d1 d2 d3").reusable("d1"), "d2 d3", "d1 d2"),
            ("row 10: outside the aligned", Fixture::new(1, four).affinity(&[0]), "d1", "d2"),
            ("row 11: no topology before unaligned", Fixture::new(3, four).affinity(&[0]), "d3", "d2 d3 d4"),
            ("row 11: nothing", Fixture::new(3, four).affinity(&[0]), "", "d1 d2 d4"),
        ] {
            let selection = fixture.plugin_prefers().preferred();
            assert_eq!(selection.resume(&list(preferred)), Ok(ids(expected)), "{case}");
        }
    }

    #[test]
    fn too_few_devices_at_the_end_are_an_error() {
        // Row 12: select counts the devices before, so only this file can build such a selection.
        let (available, must_include) = (ids("d1 d2"), ids("d1"));
        let selection = PreferredSelection { available, must_include, size: 3, fallback: list("d2") };
        let error = selection.resume(&[]).expect_err("one is missing").to_string();
        assert_eq!(error, "unexpectedly allocated less resources than required. Requested: 3, Got: 2");
    }

    fn numbered(number: u8) -> DeviceId {
        format!("d{number}").into()
    }

    fn some_ids() -> impl Strategy<Value = BTreeSet<DeviceId>> {
        proptest::collection::btree_set(0u8..10, 0..6)
            .prop_map(|numbers| numbers.into_iter().map(numbered).collect::<BTreeSet<DeviceId>>())
    }

    fn some_devices() -> impl Strategy<Value = Devices> {
        let device = (any::<bool>(), proptest::collection::btree_set(-1i64..4, 0..3));
        proptest::collection::btree_map(0u8..8, device, 0..8).prop_map(|devices| {
            let device = |(is_healthy, nodes): (bool, BTreeSet<i64>)| Device { is_healthy, nodes };
            let entry = |(number, parts): (u8, _)| (numbered(number), device(parts));
            devices.into_iter().map(entry).collect::<Devices>()
        })
    }

    fn fixtures() -> impl Strategy<Value = Fixture> {
        let assigned = proptest::option::weighted(0.2, some_ids());
        let affinity = proptest::option::of(proptest::collection::btree_set(0i64..4, 0..3));
        let devices = proptest::option::weighted(0.9, some_devices());
        (0usize..6, assigned, devices, some_ids(), some_ids(), affinity, any::<bool>()).prop_map(
            |(required, assigned, devices, in_use, reusable, affinity, plugin_prefers)| Fixture {
                required,
                assigned,
                devices,
                in_use,
                reusable,
                affinity,
                plugin_prefers,
            },
        )
    }

    proptest! {
        #[test]
        fn chosen_devices_are_as_many_as_requested_healthy_and_free(
            fixture in fixtures(),
            preferred in proptest::collection::vec(0u8..12, 0..8),
        ) {
            let preferred: Vec<DeviceId> = preferred.into_iter().map(numbered).collect();
            let taken = match fixture.select() {
                Ok(Selection::Take(taken)) => taken,
                Ok(Selection::Preferred(selection)) => {
                    prop_assert!(fixture.plugin_prefers);
                    prop_assert!(selection.must_include.is_subset(&selection.available));
                    prop_assert!(selection.must_include.len() < selection.size);
                    prop_assert!(selection.size <= selection.available.len());
                    let must_include = selection.must_include.clone();
                    let taken = selection.resume(&preferred).expect("enough devices");
                    prop_assert!(must_include.is_subset(&taken));
                    taken
                }
                Ok(Selection::Unchanged) => {
                    prop_assert_eq!(fixture.assigned.map_or(0, |assigned| assigned.len()), fixture.required);
                    return Ok(());
                }
                Err(error) => {
                    let is_incomplete = matches!(error, SelectionError::Incomplete { .. });
                    prop_assert!(!is_incomplete);
                    return Ok(());
                }
            };
            prop_assert_eq!(taken.len(), fixture.required);
            let devices = fixture.devices.expect("registered");
            for id in &taken {
                prop_assert!(devices.get(id).is_some_and(|device| device.is_healthy));
                prop_assert!(!fixture.in_use.contains(id) || fixture.reusable.contains(id));
            }
        }
    }
}
