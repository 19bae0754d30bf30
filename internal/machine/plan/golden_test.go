package plan

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/restart"
)

// TestTheSchemaOfARecordIsWhatTheGoldenFileSays fails when a field is added, renamed, taken away or changes its form. Fields are only
// ever added, and what a record without one means stays as it was: then the file is written anew (IMP_UPDATE_GOLDEN=1) and the Version
// stays. Anything else is another Version, and needs what makes a new record of an old one.
func TestTheSchemaOfARecordIsWhatTheGoldenFileSays(t *testing.T) {
	var full Record
	fill(reflect.ValueOf(&full).Elem())
	got, err := json.MarshalIndent(full, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("testdata", "record-v1.json")
	if os.Getenv("IMP_UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(path, append(got, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(bytes.TrimSpace(want), got) {
		t.Errorf("the schema has changed (see above this test):\n%s", got)
	}
	var read Record
	if err := json.Unmarshal(want, &read); err != nil || !reflect.DeepEqual(read, full) {
		t.Errorf("a record is not read as it was written: %v", err)
	}
}

// fill sets every field to something that is not its zero value and comes back from JSON as it was.
func fill(v reflect.Value) {
	switch x := v.Addr().Interface().(type) {
	case *time.Time:
		*x = time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
		return
	case *json.RawMessage:
		*x = json.RawMessage("{}")
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Struct:
		for i := range v.NumField() {
			if tag := v.Type().Field(i).Tag.Get("json"); tag != "-" {
				fill(v.Field(i))
			}
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key)
		fill(value)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.String:
		v.SetString("x")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Float64:
		v.SetFloat(1)
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(1)
	default:
		v.SetInt(1)
	}
}

// TestARecordFromBeforeSupervisionMeansWhatItMeant: the file has the form of one that a runtime wrote before halts, modes of
// restart and failures were in it.
func TestARecordFromBeforeSupervisionMeansWhatItMeant(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("testdata", "record-before-supervision.json"))
	if err != nil {
		t.Fatal(err)
	}
	var r Record
	if err := json.Unmarshal(data, &r); err != nil {
		t.Fatal(err)
	}
	now := r.Boot.StartedAt.Add(time.Hour)
	r = Reloaded(r, now)
	if r.Spec.Halt != nil || r.History.Elsewhere || r.Counters.Exits != 3 {
		t.Errorf("read as %+v", r)
	}
	// Its policy had no mode: in place, as the default is.
	end := restart.Next(r.Spec.Restart, r.History, restart.End{Kind: restart.Failure, Ran: time.Minute}, now)
	if end.Exhausted || end.History.Elsewhere || end.Delay <= 0 {
		t.Errorf("after a failure: %+v", end)
	}
	for observed, want := range map[VMM]Kind{Unknown: Recover, Alive: Watch, Over: CollectVerdict} {
		if s := Next(View{Record: r, Observed: Observation{VMM: observed}, Limits: DefaultLimits(), Now: now}); s.Kind != want {
			t.Errorf("with its VMM %s: %s (%s), want %s", observed, s.Kind, s.Why, want)
		}
	}
	if st := Status(r, Step{Kind: Watch}, ""); st.State != machine.Running || st.Name != "db" {
		t.Errorf("its status is %+v", st)
	}
}
